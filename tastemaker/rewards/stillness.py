"""Motion: what only clips have."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, Self

from torch import Tensor

from ..core.reward import BatchSize, RewardCard
from ..core.types import Metadata, Placement, Prompts


@dataclass(frozen=True)
class Stillness:
    """One minus the mean absolute change of a pixel from frame to frame."""

    batch_size: BatchSize = 64
    about: ClassVar[RewardCard] = RewardCard(range="0 to 1", hacked_by="frozen clips")
    differentiable: ClassVar[bool] = True
    reads: ClassVar[Literal["clip"]] = "clip"
    runs_on: ClassVar[Literal["device"]] = "device"

    def load(self, placement: Placement) -> Self:
        return self

    def tiny(self) -> Self:
        return self

    def score(self, pixels: Tensor, prompts: Prompts, facts: Sequence[Metadata]) -> Tensor:
        if pixels.shape[1] < 2:
            raise ValueError("stillness compares frames, but the clips have one; expected two or more")
        return 1 - pixels.diff(dim=1).abs().mean((1, 2, 3, 4))
