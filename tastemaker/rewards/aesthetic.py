"""How beautiful people find a picture (LAION's predictors, 2022)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal, Self

from torch import Tensor

from ..core.reward import BatchSize, RewardCard
from ..core.types import Metadata, Placement, Prompts
from ..models.pretrained import WeightsSource
from .backbones.clip_heads import LINEAR, ClipHeadScorer, load_clip_head
from .backbones.clip_image_encoder import CLIP_L, ClipFit
from .backbones.loading import TINY

HEAD = WeightsSource("trl-lib/ddpo-aesthetic-predictor", "aesthetic-model.pth", "3.7 MB", "Apache-2.0 upstream")


@dataclass(frozen=True)
class Aesthetic:
    """A linear head on the unit embedding of CLIP ViT-L/14: the second predictor's `sac+logos+ava1-l14-linearMSE.pth`,
    or one of the first's, `sa_0_4_vit_l_14_linear.pth`. With a `target`, minus the distance to it, as VADER has it."""

    weights: str = CLIP_L.hub
    head: str = HEAD.hub
    fit: ClipFit = "stretch"  # VADER's; `crop` is how the heads were trained
    target: float | None = None
    batch_size: BatchSize = 64
    about: ClassVar[RewardCard] = RewardCard(
        range="4 to 7",
        hacked_by="glow, saturated colours and smooth portraits; its gradient points one way for every picture, "
        "so textures with that embedding go far beyond 10",
        memory="1.2 GB, half of it in 16 bits",
        sources=(CLIP_L, HEAD),
    )
    differentiable: ClassVar[bool] = True
    reads: ClassVar[Literal["frames"]] = "frames"
    runs_on: ClassVar[Literal["device"]] = "device"

    def load(self, placement: Placement) -> AestheticScorer:
        return AestheticScorer(load_clip_head(self.weights, self.head, HEAD, LINEAR, self.fit, placement), self.target)

    def tiny(self) -> Self:
        return replace(self, weights=TINY, head=TINY)


@dataclass(frozen=True)
class AestheticScorer:
    gaze: ClipHeadScorer
    target: float | None

    def score(self, pixels: Tensor, prompts: Prompts, facts: Sequence[Metadata]) -> Tensor:
        found = self.gaze(pixels)
        return found if self.target is None else -(found - self.target).abs()
