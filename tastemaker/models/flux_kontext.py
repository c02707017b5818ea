"""FLUX.1 Kontext (Black Forest Labs 2025): FLUX that sees a picture beside the prompt, and so can edit it."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, ClassVar

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from ..core.policy import Process
from ..core.types import Condition, Metadata, Placement, Prompts
from ..data.image_io import read_image
from ..processes.gaussian import GaussianProcess
from .flux import CHANNELS, FACTOR, Flux, FluxBackbone, Side, pack_latents, unpack_latents
from .pipeline_components import TINY, weight_sources
from .pipeline_layout import PipelineLayout, flux_to_original
from .pretrained import WeightsSource
from .text_encoders import CachedTextEncoder

KONTEXT = WeightsSource(
    "black-forest-labs/FLUX.1-Kontext-dev", "", "34 GB", "FLUX.1 [dev] Non-Commercial License", gated=True
)


class KontextBackbone:
    """Denoises [1, 16, h, w] latents beside those of the picture in the fact `image`, which stay as they are.

    Where no row has a picture, it draws from the prompt alone, as FLUX does.
    """

    passes = 1

    def __init__(self, spec: FluxKontext, placement: Placement) -> None:
        self._over(FluxBackbone(spec.plain(), placement, KONTEXT))

    def _over(self, flux: FluxBackbone) -> None:
        self.flux, self.shape, self.pixels, own = flux, flux.shape, flux.pixels, flux.places
        given = torch.cat([torch.ones_like(own[:, :1]), own[:, 1:]], 1)  # the same places on another sheet
        self.places = torch.cat([own, given])

    def sized(self, height: int, width: int) -> KontextBackbone:
        other = copy(self)
        other._over(self.flux.sized(height, width))
        return other

    def steered(self, scale: float | None) -> KontextBackbone:
        other = copy(self)
        other._over(self.flux.steered(scale))
        return other

    @property
    def net(self) -> nn.Module:
        return self.flux.net

    @net.setter
    def net(self, net: nn.Module) -> None:
        self.flux.net = net

    def embed(self, prompts: Prompts, facts: Sequence[Metadata] = ()) -> Condition:
        cond = self.flux.embed(prompts, facts)
        shown = [fact.get("image") for fact in facts]
        if all(image is None for image in shown):
            return cond
        known: dict[int | str, Tensor] = {}
        rows = [self._reference(image, prompt, known) for image, prompt in zip(shown, prompts, strict=True)]
        return replace(cond, tensors={**cond.tensors, "reference": torch.stack(rows)})

    def _reference(self, image: object, prompt: str, known: dict[int | str, Tensor]) -> Tensor:
        """A picture as tokens, each picture of a batch encoded once: [n, 64]."""
        key = str(image) if isinstance(image, (str, Path)) else id(image)
        if key not in known:
            pixels = read_image(Path(image)) if isinstance(image, (str, Path)) else image
            if not isinstance(pixels, Tensor):
                raise ValueError(
                    f"'{prompt:.80}' has no fact 'image', but others have; give a path or pixels [F, 3, H, W] for each "
                    "prompt, or for none"
                )
            seen = resize_and_center_crop(pixels[:1], *self.pixels[2:]).to(self.places.device)
            known[key] = pack_latents(self.flux.encode(seen[None])[:, 0])[0]
        return known[key]

    def predict(self, x: Tensor, t: Tensor, cond: Condition) -> Tensor:
        given = cond.tensors.get("reference")
        if given is None:
            return self.flux.predict(x, t, cond)
        own = pack_latents(x[:, 0])
        out = self.flux.said(torch.cat([own, given.to(own.dtype)], 1), self.places, t, cond)
        return unpack_latents(out[:, : own.shape[1]], *self.shape[2:])[:, None]

    def encode(self, pixels: Tensor) -> Tensor:
        return self.flux.encode(pixels)

    def decode(self, x: Tensor, frames: Sequence[int] | None = None) -> Tensor:
        return self.flux.decode(x, frames)


def resize_and_center_crop(pixels: Tensor, height: int, width: int) -> Tensor:
    """The middle of pictures [N, 3, H, W] at a size, as much of them as fits."""
    scale = max(height / pixels.shape[2], width / pixels.shape[3])
    high, wide = max(height, round(pixels.shape[2] * scale)), max(width, round(pixels.shape[3] * scale))
    if (high, wide) != tuple(pixels.shape[2:]):
        pixels = F.interpolate(pixels, (high, wide), mode="bicubic", antialias=True).clamp(0, 1)
    top, left = (high - height) // 2, (wide - width) // 2
    return pixels[..., top : top + height, left : left + width]


@dataclass(frozen=True)
class FluxKontext:
    """FLUX.1 Kontext: edits the picture in the fact `image` (a path), brought to the size of what it makes."""

    weights: str = KONTEXT.hub  # hub id or folder in diffusers' layout
    transformer: str | None = None  # one safetensors file in its place, in diffusers' or the authors' layout
    height: Side = 1024
    width: Side = 1024
    guidance: float = 2.5  # written into the network
    rollout_guidance: float | None = None  # likewise where no gradient is wanted, if different
    words: Annotated[int, Field(ge=1, le=512)] = 512  # tokens a prompt is cut or filled up to
    truncate: bool = False  # levels to three digits, as SRPO does
    recompute: bool = True  # the decoder in the backward pass, for a seventh of its memory
    embeddings: Path | None = None  # a folder `tastemaker embed` wrote; without others, no text encoder is loaded
    seed: int = 0
    frames: ClassVar[int] = 1
    suits: ClassVar[type[Process]] = GaussianProcess
    layout: ClassVar[PipelineLayout] = PipelineLayout(
        "FluxKontextPipeline", "transformer", "lora_transformer", flux_to_original
    )

    @property
    def shape(self) -> tuple[int, int, int, int]:
        return 1, CHANNELS, self.height // FACTOR, self.width // FACTOR

    @property
    def sources(self) -> tuple[WeightsSource, ...]:
        return weight_sources(self.weights, KONTEXT)

    def plain(self) -> Flux:
        """The FLUX that it is but for the picture."""
        return Flux(
            weights=self.weights,
            transformer=self.transformer,
            height=self.height,
            width=self.width,
            guidance=self.guidance,
            rollout_guidance=self.rollout_guidance,
            words=self.words,
            truncate=self.truncate,
            recompute=self.recompute,
            embeddings=self.embeddings,
            seed=self.seed,
        )

    def texts(self, placement: Placement) -> CachedTextEncoder:
        return self.plain().texts(placement)

    def load(self, placement: Placement) -> KontextBackbone:
        return KontextBackbone(self, placement)

    def tiny(self) -> FluxKontext:
        return replace(self, weights=TINY, transformer=None, height=32, width=32, words=16, embeddings=None)
