"""Open-Sora 1.2 (HPC-AI Tech 2024): a rectified flow of clips on our own STDiT3, read to by T5."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, ClassVar, cast

import torch
from pydantic import Field
from torch import Tensor, nn

from ...core.distributions import broadcast_to_shape
from ...core.policy import Process
from ...core.types import Condition, Metadata, Placement, Prompts
from ...processes.gaussian import GaussianProcess
from ..cached_text_encoder import build_cached_text_encoder
from ..flux_kontext import resize_and_center_crop
from ..nets.opensora_vae import latent_index, num_latents
from ..nets.stdit3 import STDiT3
from ..pipeline_components import TINY, PipelineComponents, weight_sources
from ..pipeline_layout import PipelineLayout
from ..pretrained import WeightsSource
from ..text_encoders import CachedTextEncoder, disable_autocast
from ..video_backbone import check_clip_shape, encode_with_t5
from .components import LAYOUT, SMALL, STDIT, T5, VAE, build_network, has_random_weights, load_opensora_vae
from .reference_frames import reference_latents
from .resolutions import (
    IMAGE_FPS,
    add_score_tags,
    clean_opensora_prompt,
    resolve_num_frames,
    resolve_size,
    timestep_shift,
)

CHANNELS, FACTOR, LEVELS = 4, 8, 1000


class OpenSoraPromptEncoder:
    """What T5 says of every word of a prompt and of what is added to it, and which words there are."""

    def __init__(self, kit: PipelineComponents, spec: OpenSora) -> None:
        from transformers import T5EncoderModel

        self.spec, self.t5 = spec, kit.reader("text_encoder", T5EncoderModel, "tokenizer", spec.words)

    def __call__(self, prompts: list[str]) -> dict[str, Tensor]:
        spec = self.spec
        told = [add_score_tags(prompt, spec.aesthetic, spec.motion, spec.camera) for prompt in prompts]
        return encode_with_t5(
            self.t5, [clean_opensora_prompt(text) if spec.clean else text for text in told], masked=True
        )


class OpenSoraBackbone:
    """Denoises [m, 4, h, w] latents, five for seventeen frames: the velocity noise - clean at 1000 t.

    Frames that facts hold (`image`, `mask_strategy`) are shown to the network clean, and end as they were given.
    """

    passes = 1

    def __init__(self, spec: OpenSora, placement: Placement) -> None:
        self.spec, self.device = spec, placement.device
        self.net: nn.Module = build_network(spec.weights, spec.seed, placement)
        self.codec = load_opensora_vae(spec.vae, spec.seed, placement, together=spec.together, recompute=spec.recompute)
        self.texts = spec.texts(placement)
        self.shape: tuple[int, ...] = spec.shape
        self.pixels, self.size = spec.pixels, spec.size
        self.nothing = cast(STDiT3, self.net).y_embedder.y_embedding[: spec.words].detach().clone()

    def embed(self, prompts: Prompts, facts: Sequence[Metadata] = ()) -> Condition:
        known = reference_latents(facts, self.shape, self._reference, self.device)
        return Condition(tuple(prompts), {**self.texts(prompts), **known}, tuple(facts))

    def without(self, cond: Condition) -> Condition:
        """Words the network learned for none, as many as the prompt has."""
        told = cond.tensors["words"]
        plain = self.nothing.to(told).expand(len(told), -1, -1)
        return replace(cond, tensors={**cond.tensors, "words": plain})

    def predict(self, x: Tensor, t: Tensor, cond: Condition) -> Tensor:
        known, until = cond.tensors.get("held"), cond.tensors.get("until")
        if known is None or until is None:
            return self._said(x, t, cond, None)
        free = until >= t[:, None]
        apart = broadcast_to_shape(free.flatten(), x.flatten(0, 1)).view(*free.shape, 1, 1, 1)
        said = self._said(torch.where(apart, x, known.to(x.dtype)), t, cond, free)
        return torch.where(
            apart, said, (x - known) / broadcast_to_shape(t, x).clamp(min=1e-4)
        )  # that leads to what is held

    def _said(self, x: Tensor, t: Tensor, cond: Condition, free: Tensor | None) -> Tensor:
        dtype = next(self.net.parameters()).dtype  # without autocast, all of them must be alike
        seen, told = cond.tensors.get("seen"), cond.tensors["words"]
        counts = [told.shape[1]] if seen is None else seen.sum(1).tolist()  # filling comes last
        rate = self.spec.fps if self.pixels[0] > 1 else IMAGE_FPS
        out: Tensor = self.net(
            x.transpose(1, 2).to(dtype),
            t * LEVELS,
            told[:, : max(counts)].to(dtype),
            None if seen is None or min(counts) == max(counts) else seen[:, : max(counts)],  # none is faster
            free,
            fps=torch.full_like(t, rate),
            size=self.size,
        )
        return -out[:, :CHANNELS].transpose(1, 2)

    def sized(self, height: int, width: int) -> OpenSoraBackbone:
        other = copy(self)
        other.spec = replace(self.spec, resolution=f"{height}x{width}")
        other.shape, other.pixels, other.size = other.spec.shape, other.spec.pixels, other.spec.size
        return other

    @torch.no_grad()
    def encode(self, pixels: Tensor) -> Tensor:
        check_clip_shape(pixels, self.pixels)
        return self._encoded(pixels)

    def _encoded(self, pixels: Tensor) -> Tensor:
        seen = (2 * pixels - 1).transpose(1, 2).to(self.codec.scale.dtype)
        with disable_autocast(seen):
            return self.codec.encode(seen).float().transpose(1, 2)

    @torch.no_grad()
    def _reference(self, pixels: Tensor) -> Tensor:
        return self._encoded(resize_and_center_crop(pixels, *self.pixels[2:])[None].to(self.device))[0]

    def decode(self, x: Tensor, frames: Sequence[int] | None = None) -> Tensor:
        z, count = x.transpose(1, 2).to(self.codec.scale.dtype), self.pixels[0]
        with disable_autocast(z):
            if frames is not None and self.spec.isolated:
                shown = self.codec.decode_alone(z, [latent_index(range(count)[k], count) for k in frames])
            else:
                shown = self.codec.decode(z, count, frames)
        return (shown.float() / 2 + 0.5).clamp(0, 1).transpose(1, 2)


@dataclass(frozen=True)
class OpenSora:
    """Open-Sora 1.2; the shift of its levels goes with the size and the length of the clip."""

    weights: str = STDIT.hub  # of STDiT3: a folder or file as published, or its name on the hub
    vae: str = VAE.hub  # likewise
    text: str = T5.hub  # a folder with text_encoder and tokenizer of T5 v1.1 XXL
    resolution: str = "240p"  # 144p to 4k, or height and width such as 276x368
    aspect: str = "3:4"  # height to width
    duration: str | int = "2s"  # 2s to 32s, or a number of frames, of which 1 is a still
    fps: Annotated[float, Field(gt=0, le=240)] = 24.0
    aesthetic: float | None = 6.5  # added to prompts, as training captions had it
    motion: float | None = None
    camera: str | None = None  # likewise, such as "pan left"
    clean: bool = True  # prompts of capitals and signs
    words: Annotated[int, Field(ge=1, le=300)] = 300  # tokens that prompts are cut to
    together: Annotated[int, Field(ge=1)] = 4  # frames that are coded in one call
    isolated: bool = False  # a frame asked for is shown by its latent alone, as VADER does: not as in the whole clip
    recompute: bool = True  # the autoencoder's activations when its gradient is asked for
    embeddings: Path | None = None  # a folder `tastemaker embed` wrote; without others, no text encoder is loaded
    seed: int = 0  # of random weights
    suits: ClassVar[type[Process]] = GaussianProcess
    layout: ClassVar[PipelineLayout] = LAYOUT

    def __post_init__(self) -> None:
        resolve_size(self.resolution, self.aspect)
        resolve_num_frames(self.duration)

    @property
    def size(self) -> tuple[int, int]:
        """As the network is told it; what is decoded is smaller where it is no multiple of eight."""
        return resolve_size(self.resolution, self.aspect)

    @property
    def frames(self) -> int:
        return resolve_num_frames(self.duration)

    @property
    def shift(self) -> float | None:
        return None if has_random_weights(self.weights) else timestep_shift(*self.size, self.frames)

    @property
    def shape(self) -> tuple[int, int, int, int]:
        height, width = self.size
        return num_latents(self.frames), CHANNELS, height // FACTOR, width // FACTOR

    @property
    def pixels(self) -> tuple[int, int, int, int]:
        return self.frames, 3, self.shape[2] * FACTOR, self.shape[3] * FACTOR

    @property
    def sources(self) -> tuple[WeightsSource, ...]:
        return (*weight_sources(self.weights, STDIT), *weight_sources(self.vae, VAE), *weight_sources(self.text, T5))

    def texts(self, placement: Placement) -> CachedTextEncoder:
        kit = PipelineComponents(self.text, T5, SMALL, placement, self.seed)
        told = {name: getattr(self, name) for name in ("words", "aesthetic", "motion", "camera", "clean")}
        settings = {"model": "opensora", **told}
        return build_cached_text_encoder(
            kit, lambda: OpenSoraPromptEncoder(kit, self), ("text_encoder",), settings, self.embeddings
        )

    def load(self, placement: Placement) -> OpenSoraBackbone:
        return OpenSoraBackbone(self, placement)

    def tiny(self) -> OpenSora:
        few, name = min(self.words, 16), {"weights": TINY, "vae": TINY, "text": TINY, "resolution": "16x16"}
        return replace(self, **name, duration=min(self.frames, 6), words=few, aesthetic=None, embeddings=None)  # type: ignore[arg-type]
