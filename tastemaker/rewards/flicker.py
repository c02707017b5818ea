"""How much a clip flickers, without any weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, Self

from torch import Tensor

from ..core.reward import BatchSize, RewardCard
from ..core.types import Metadata, Placement, Prompts
from .backbones.optical_flow import flicker_score


@dataclass(frozen=True)
class Flicker:
    """Minus half the mean difference of a pixel to the mean of its two neighbours in time, motion followed.

    What moves or fades evenly costs nothing, what is bright and dark in turn costs its amplitude. Frames are compared
    at 64 pixels a side, so grain finer than that is averaged away.
    """

    batch_size: BatchSize = 16
    about: ClassVar[RewardCard] = RewardCard(
        range="-0.5 to 0, above -0.02 for a steady clip that moves or not", hacked_by="frozen or blurred clips"
    )
    differentiable: ClassVar[bool] = True
    reads: ClassVar[Literal["clip"]] = "clip"
    runs_on: ClassVar[Literal["device"]] = "device"

    def load(self, placement: Placement) -> Self:
        return self

    def tiny(self) -> Self:
        return self

    def score(self, pixels: Tensor, prompts: Prompts, facts: Sequence[Metadata]) -> Tensor:
        if pixels.shape[1] < 3:
            raise ValueError(f"flicker needs three frames or more, but the clips have {pixels.shape[1]}")
        return -flicker_score(pixels)
