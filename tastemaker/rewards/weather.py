"""Whether it rains or snows in a picture (VADER, Prabhudesai et al. 2024)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal, Self

from torch import Tensor

from ..reward import About, Rows
from ..types import Facts, Placement, Prompts
from .nets.heads import LINEAR, VADER, Gaze, gaze
from .nets.hub import TINY
from .nets.image_tower import CLIP_L, Fit


@dataclass(frozen=True)
class Weather:
    """The probability of rain or snow: a linear head and a sigmoid on the unit embedding of CLIP ViT-L/14, whose file
    comes with VADER's code as `assets/rainy_reward.pt` or `assets/snowy_reward.pt`."""

    kind: Literal["rainy", "snowy"] = "rainy"
    weights: str = CLIP_L.hub
    head: str = ""  # a path; `rainy_reward.pt` or `snowy_reward.pt` here if empty
    fit: Fit = "stretch"
    batch_size: Rows = 64
    about: ClassVar[About] = About(
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
        return WeatherScorer(gaze(self.weights, self.head or file, source, LINEAR, self.fit, placement))

    def tiny(self) -> Self:
        return replace(self, weights=TINY, head=TINY)


@dataclass(frozen=True)
class WeatherScorer:
    gaze: Gaze

    def score(self, pixels: Tensor, prompts: Prompts, facts: Sequence[Facts]) -> Tensor:
        return self.gaze(pixels).sigmoid()
