"""Likeness to a picture as people see it (LPIPS, Zhang et al. 2018)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal, Self

from torch import Tensor

from ..autoencoders.lpips import TINY, VGG16, LPIPSDistance, load_lpips
from ..core.reward import BatchSize, RewardCard
from ..core.types import Metadata, Placement, Prompts
from .target_image import target_images


@dataclass(frozen=True)
class Lpips:
    """Minus the perceptual distance to the picture in the fact `target`: VGG16 and the heads of LPIPS 0.1."""

    weights: str = VGG16.hub  # VGG16 of torchvision or timm, or an LPIPS whole
    heads: str = ""  # a path; those of the installed package lpips if empty
    batch_size: BatchSize = 32
    about: ClassVar[RewardCard] = RewardCard(
        range="-0.8 to 0",
        hacked_by="nothing but the target itself, though fine grain may differ",
        memory="59 MB",
        sources=(VGG16,),
    )
    differentiable: ClassVar[bool] = True
    reads: ClassVar[Literal["frames"]] = "frames"
    runs_on: ClassVar[Literal["device"]] = "device"

    def load(self, placement: Placement) -> LpipsScorer:
        return LpipsScorer(load_lpips(self.weights, self.heads, placement))

    def tiny(self) -> Self:
        return replace(self, weights=TINY)


@dataclass(frozen=True)
class LpipsScorer:
    net: LPIPSDistance

    def score(self, pixels: Tensor, prompts: Prompts, facts: Sequence[Metadata]) -> Tensor:
        wanted = target_images(pixels, prompts, facts)
        out: Tensor = self.net(pixels[:, 0].to(self.net.scale.dtype), wanted.to(self.net.scale.dtype))
        return -out.to(pixels.dtype)
