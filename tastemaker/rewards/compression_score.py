"""How small a network believes a picture's JPEG to be (VADER, Prabhudesai et al. 2024)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal, Self

from torch import Tensor

from ..core.reward import BatchSize, RewardCard
from ..core.types import Metadata, Placement, Prompts
from .backbones.clip_heads import RECTIFIED, VADER, ClipHeadScorer, load_clip_head
from .backbones.clip_image_encoder import CLIP_L, ClipFit
from .backbones.loading import TINY


@dataclass(frozen=True)
class CompressionScore:
    """Minus the kilobytes of the JPEG, at quality 95, that a head on the unit embedding of CLIP ViT-L/14 predicts; its
    file comes with VADER's code. `jpeg` counts the real ones, and `compression` has gradients without a network."""

    sign: Literal["compressible", "incompressible"] = "compressible"
    weights: str = CLIP_L.hub
    head: str = "compression_reward.pt"  # a path
    fit: ClipFit = "stretch"
    batch_size: BatchSize = 64
    about: ClassVar[RewardCard] = RewardCard(
        range="-20 to 0 kilobytes",
        hacked_by="what looks plain to CLIP and is not; watch `jpeg` beside it",
        memory="1.2 GB, half of it in 16 bits",
        sources=(CLIP_L,),
    )
    differentiable: ClassVar[bool] = True
    reads: ClassVar[Literal["frames"]] = "frames"
    runs_on: ClassVar[Literal["device"]] = "device"

    def load(self, placement: Placement) -> CompressionScorer:
        source = f"assets/compression_reward.pt of {VADER}"
        seeing = load_clip_head(self.weights, self.head, source, RECTIFIED, self.fit, placement)
        return CompressionScorer(seeing, -1 if self.sign == "compressible" else 1)

    def tiny(self) -> Self:
        return replace(self, weights=TINY, head=TINY)


@dataclass(frozen=True)
class CompressionScorer:
    gaze: ClipHeadScorer
    sign: int

    def score(self, pixels: Tensor, prompts: Prompts, facts: Sequence[Metadata]) -> Tensor:
        return self.sign * self.gaze(pixels)
