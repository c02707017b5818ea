"""Whether it rains or snows in a picture (VADER, Prabhudesai et al. 2024)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal, Self

from torch import Tensor

from ..core.reward import BatchSize, RewardCard
from ..core.types import Metadata, Placement, Prompts
from .backbones.clip_heads import LINEAR, VADER, ClipHeadScorer, load_clip_head
from .backbones.clip_image_encoder import CLIP_L, ClipFit
from .backbones.loading import TINY


@dataclass(frozen=True)
class Weather:
    """The probability of rain or snow: a linear head and a sigmoid on the unit embedding of CLIP ViT-L/14, whose file
    comes with VADER's code as `assets/rainy_reward.pt` or `assets/snowy_reward.pt`."""

    kind: Literal["rainy", "snowy"] = "rainy"
    weights: str = CLIP_L.hub
    head: str = ""  # a path; `rainy_reward.pt` or `snowy_reward.pt` here if empty
    fit: ClipFit = "stretch"
    batch_size: BatchSize = 64
    about: ClassVar[RewardCard] = RewardCard(
        range="0 to 1",
        hacked_by="grey haze and streaks for rain, white noise for snow",
        memory="1.2 GB, half of it in 16 bits",
        sources=(CLIP_L,),
    )
    differentiable: ClassVar[bool] = True
    reads: ClassVar[Literal["frames"]] = "frames"
    runs_on: ClassVar[Literal["device"]] = "device"

    def load(self, placement: Placement) -> WeatherScorer:
        file = f"{self.kind}_reward.pt"
        source = f"assets/{file} of {VADER}"
        return WeatherScorer(load_clip_head(self.weights, self.head or file, source, LINEAR, self.fit, placement))

    def tiny(self) -> Self:
        return replace(self, weights=TINY, head=TINY)


@dataclass(frozen=True)
class WeatherScorer:
    gaze: ClipHeadScorer

    def score(self, pixels: Tensor, prompts: Prompts, facts: Sequence[Metadata]) -> Tensor:
        return self.gaze(pixels).sigmoid()
