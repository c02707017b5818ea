"""Open-Sora 1.2 (HPC-AI Tech 2024): a rectified flow for video on STDiT3, conditioned on T5 embeddings."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, ClassVar, cast

import torch
from pydantic import Field
from torch import Tensor, nn

from ...core.distributions import expand_dims_like
from ...core.model_spec import ModelSpec, PipelineLayout
from ...core.policy import Backbone, Process
from ...core.types import Condition, Metadata, Placement, Prompts
from ...processes.gaussian import GaussianProcess
from ..image_backbone import resize_and_center_crop
from ..nets.opensora_vae import latent_index, num_latents
from ..nets.stdit3 import STDiT3
from ..pipeline_components import TINY, PipelineComponents, weight_sources
from ..pretrained import WeightsSource
from ..text_encoders import CachedTextEncoder, TextEncoders, disable_autocast
from ..video_backbone import check_clip_shape, encode_with_t5
from .components import (
    CONFIGS,
    LAYOUT,
    STDIT,
    T5,
    TINY_CONFIGS,
    VAE,
    build_network,
    has_random_weights,
    load_opensora_vae,
)
from .reference_frames import reference_latents
from .resolutions import (
    IMAGE_FPS,
    add_score_tags,
    clean_opensora_prompt,
    resolve_num_frames,
    resolve_size,
    timestep_shift,
)

LATENT_CHANNELS, DOWNSAMPLE_FACTOR, NUM_TIMESTEPS = 4, 8, 1000


class OpenSoraPromptEncoder(TextEncoders):
    """T5 embeddings of prompts with the score tags of the training captions, and their attention masks."""

    def __init__(self, components: PipelineComponents, spec: OpenSoraSpec) -> None:
        from transformers import T5EncoderModel

        length = spec.max_text_tokens
        self.spec, self.t5 = spec, components.load_text_encoder("text_encoder", T5EncoderModel, "tokenizer", length)
        self.text_encoders = (self.t5,)

    def __call__(self, prompts: list[str]) -> dict[str, Tensor]:
        spec = self.spec
        scores = spec.aesthetic_score, spec.motion_score, spec.camera_motion
        texts = [add_score_tags(prompt, *scores) for prompt in prompts]
        return encode_with_t5(
            self.t5,
            [clean_opensora_prompt(text) if spec.clean_prompts else text for text in texts],
            use_attention_mask=True,
        )


class OpenSoraBackbone(Backbone):
    """Predicts the velocity noise - clean of latents [m, 4, h, w], 5 latents for 17 frames, at timestep 1000 t.

    Reference frames in the metadata (`image`, `mask_strategy`) are given to the network without noise and come out
    unchanged.
    """

    forward_passes = 1
    has_unconditional = True

    def __init__(self, spec: OpenSoraSpec, placement: Placement) -> None:
        self.spec, self.device = spec, placement.device
        self.net: nn.Module = build_network(spec.weights, spec.seed, placement)
        self.autoencoder = load_opensora_vae(
            spec.vae,
            spec.seed,
            placement,
            decode_chunk_size=spec.decode_chunk_size,
            checkpoint_decoder=spec.checkpoint_decoder,
        )
        self.prompt_encoder = spec.load_prompt_encoder(placement)
        self.shape: tuple[int, ...] = spec.shape
        self.pixels, self.size = spec.pixels, spec.size
        self.null_embedding = cast(STDiT3, self.net).y_embedder.y_embedding[: spec.max_text_tokens].detach().clone()

    def enable_text_encoder_training(self) -> dict[str, nn.Module]:
        return self.prompt_encoder.enable_training()

    def embed(self, prompts: Prompts, metadata: Sequence[Metadata] = ()) -> Condition:
        references = reference_latents(metadata, self.shape, self._encode_reference, self.device)
        return Condition(tuple(prompts), {**self.prompt_encoder(prompts), **references}, tuple(metadata))

    def without_prompt(self, cond: Condition) -> Condition:
        """The learned null embedding, with the attention mask of the prompt."""
        prompt_embeds = cond.tensors["prompt_embeds"]
        null = self.null_embedding.to(prompt_embeds).expand(len(prompt_embeds), -1, -1)
        return replace(cond, tensors={**cond.tensors, "prompt_embeds": null})

    def predict(self, x: Tensor, t: Tensor, cond: Condition) -> Tensor:
        references, until = cond.tensors.get("reference_latents"), cond.tensors.get("fixed_until")
        if references is None or until is None:
            return self._velocity(x, t, cond, None)
        noisy = until >= t[:, None]  # [B, m]
        mask = expand_dims_like(noisy.flatten(), x.flatten(0, 1)).view(*noisy.shape, 1, 1, 1)
        velocity = self._velocity(torch.where(mask, x, references.to(x.dtype)), t, cond, noisy)
        to_reference = (x - references) / expand_dims_like(t, x).clamp(min=1e-4)
        return torch.where(mask, velocity, to_reference)

    def _velocity(self, x: Tensor, t: Tensor, cond: Condition, noisy: Tensor | None) -> Tensor:
        dtype = next(self.net.parameters()).dtype  # without autocast all inputs must have the dtype of the weights
        mask, prompt_embeds = cond.tensors.get("attention_mask"), cond.tensors["prompt_embeds"]
        lengths = [prompt_embeds.shape[1]] if mask is None else mask.sum(1).tolist()  # padding is on the right
        fps = self.spec.fps if self.pixels[0] > 1 else IMAGE_FPS
        out: Tensor = self.net(
            x.transpose(1, 2).to(dtype),
            t * NUM_TIMESTEPS,
            prompt_embeds[:, : max(lengths)].to(dtype),
            None if mask is None or min(lengths) == max(lengths) else mask[:, : max(lengths)],  # no mask is faster
            noisy,
            fps=torch.full_like(t, fps),
            size=self.size,
        )
        return -out[:, :LATENT_CHANNELS].transpose(1, 2)

    def with_size(self, height: int, width: int) -> OpenSoraBackbone:
        other = copy(self)
        other.spec = replace(self.spec, resolution=f"{height}x{width}")
        other.shape, other.pixels, other.size = other.spec.shape, other.spec.pixels, other.spec.size
        return other

    @torch.no_grad()
    def encode(self, pixels: Tensor) -> Tensor:
        check_clip_shape(pixels, self.pixels)
        return self._encode(pixels)

    def _encode(self, pixels: Tensor) -> Tensor:
        video = (2 * pixels - 1).transpose(1, 2).to(self.autoencoder.scale.dtype)
        with disable_autocast(video):
            return self.autoencoder.encode(video).float().transpose(1, 2)

    @torch.no_grad()
    def _encode_reference(self, pixels: Tensor) -> Tensor:
        return self._encode(resize_and_center_crop(pixels, *self.pixels[2:])[None].to(self.device))[0]

    def decode(self, x: Tensor, frames: Sequence[int] | None = None) -> Tensor:
        z, count = x.transpose(1, 2).to(self.autoencoder.scale.dtype), self.pixels[0]
        with disable_autocast(z):
            if frames is not None and self.spec.decode_single_latents:
                indices = [latent_index(range(count)[k], count) for k in frames]
                video = self.autoencoder.decode_single_latents(z, indices)
            else:
                video = self.autoencoder.decode(z, count, frames)
        return (video.float() / 2 + 0.5).clamp(0, 1).transpose(1, 2)


@dataclass(frozen=True)
class OpenSoraSpec(ModelSpec):
    """Open-Sora 1.2; its timestep shift depends on the size and the length of the video."""

    weights: str = STDIT.hub  # of STDiT3: a file, a folder or a hub name
    vae: str = VAE.hub  # a file, a folder or a hub name
    text_encoder: str = T5.hub  # T5 v1.1 XXL: a hub name, or its folder, with or without text_encoder/ and tokenizer/
    resolution: str = "240p"  # 144p to 4k, or height and width such as 276x368
    aspect_ratio: str = "3:4"  # height : width
    duration: str | int = "2s"  # 2s to 32s, or a number of frames; 1 is an image
    fps: Annotated[float, Field(gt=0, le=240)] = 24.0
    aesthetic_score: float | None = 6.5  # this and the next two are added to prompts, as in the training captions
    motion_score: float | None = None
    camera_motion: str | None = None  # such as "pan left"
    clean_prompts: bool = True  # normalize prompts like the training captions
    max_text_tokens: Annotated[int, Field(ge=1, le=300)] = 300  # longer prompts are truncated
    decode_chunk_size: Annotated[int, Field(ge=1)] = 4  # frames per call of the image VAE
    decode_single_latents: bool = False  # decode requested frames without their neighbors, as VADER does
    checkpoint_decoder: bool = True  # recompute activations of the autoencoder in the backward pass
    embeddings: Path | None = None  # a folder written by `tastemaker embed`; then no text encoder is loaded
    seed: int = 0  # of random weights
    process_type: ClassVar[type[Process]] = GaussianProcess
    releases: ClassVar[tuple[WeightsSource, ...]] = (STDIT,)
    layout: ClassVar[PipelineLayout] = LAYOUT

    def __post_init__(self) -> None:
        resolve_size(self.resolution, self.aspect_ratio)
        resolve_num_frames(self.duration)

    @property
    def size(self) -> tuple[int, int]:
        """Height and width as the network's input; decoded videos are smaller where these are no multiples of eight."""
        return resolve_size(self.resolution, self.aspect_ratio)

    @property
    def frames(self) -> int:
        return resolve_num_frames(self.duration)

    @property
    def timestep_shift(self) -> float | None:
        return None if has_random_weights(self.weights) else timestep_shift(*self.size, self.frames)

    @property
    def shape(self) -> tuple[int, int, int, int]:
        height, width = self.size
        return num_latents(self.frames), LATENT_CHANNELS, height // DOWNSAMPLE_FACTOR, width // DOWNSAMPLE_FACTOR

    @property
    def pixels(self) -> tuple[int, int, int, int]:
        return self.frames, 3, self.shape[2] * DOWNSAMPLE_FACTOR, self.shape[3] * DOWNSAMPLE_FACTOR

    @property
    def sources(self) -> tuple[WeightsSource, ...]:
        return (
            *weight_sources(self.weights, STDIT),
            *weight_sources(self.vae, VAE),
            *weight_sources(self.text_encoder, T5),
        )

    def load_prompt_encoder(self, placement: Placement) -> CachedTextEncoder:
        components = PipelineComponents(self.text_encoder, T5, TINY_CONFIGS, placement, self.seed, CONFIGS)
        identity = {  # stored with the embeddings, so the names stay
            "model": "opensora",
            "max_text_tokens": self.max_text_tokens,
            "aesthetic": self.aesthetic_score,
            "motion": self.motion_score,
            "camera": self.camera_motion,
            "clean": self.clean_prompts,
        }
        return components.cache_text_encoders(
            lambda: OpenSoraPromptEncoder(components, self), ("text_encoder",), identity, self.embeddings
        )

    def load(self, placement: Placement) -> OpenSoraBackbone:
        return OpenSoraBackbone(self, placement)

    def tiny(self) -> OpenSoraSpec:
        return replace(
            self,
            weights=TINY,
            vae=TINY,
            text_encoder=TINY,
            resolution="16x16",
            duration=min(self.frames, 6),
            max_text_tokens=min(self.max_text_tokens, 16),
            aesthetic_score=None,
            embeddings=None,
        )
