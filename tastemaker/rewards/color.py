"""Brightness and colour: rewards one can see by eye."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal, Self

from torch import Tensor

from ..core.reward import BatchSize, RewardCard
from ..core.toy_colors import TOY_COLORS
from ..core.types import Metadata, Placement, Prompts


@dataclass(frozen=True)
class Brightness:
    """The mean of all pixels, or minus its distance to a target."""

    target: float | None = None  # in [0, 1]
    batch_size: BatchSize = 64
    about: ClassVar[RewardCard] = RewardCard(range="0 to 1", hacked_by="plain white")
    differentiable: ClassVar[bool] = True
    reads: ClassVar[Literal["frames"]] = "frames"
    runs_on: ClassVar[Literal["device"]] = "device"

    def load(self, placement: Placement) -> Self:
        return self

    def tiny(self) -> Self:
        return self

    def score(self, pixels: Tensor, prompts: Prompts, facts: Sequence[Metadata]) -> Tensor:
        mean = pixels.mean((1, 2, 3, 4))
        return mean if self.target is None else -(mean - self.target).abs()


@dataclass(frozen=True)
class Color:
    """One minus the mean distance of the picture's mean colour to the colour its prompt names last."""

    names: Mapping[str, tuple[float, float, float]] = field(default_factory=lambda: dict(TOY_COLORS), hash=False)
    batch_size: BatchSize = 64
    about: ClassVar[RewardCard] = RewardCard(range="0 to 1", hacked_by="a plain field of the colour named")
    differentiable: ClassVar[bool] = True
    reads: ClassVar[Literal["frames"]] = "frames"
    runs_on: ClassVar[Literal["device"]] = "device"

    def load(self, placement: Placement) -> Self:
        return self

    def tiny(self) -> Self:
        return self

    def score(self, pixels: Tensor, prompts: Prompts, facts: Sequence[Metadata]) -> Tensor:
        goals = pixels.new_tensor([self._named(prompt) for prompt in prompts])  # [B, 3]
        return 1 - (pixels.mean((1, 3, 4)) - goals).abs().mean(1)

    def _named(self, prompt: str) -> tuple[float, float, float]:
        found = [word for word in re.findall(r"\w+", prompt.lower()) if word in self.names]
        if not found:
            raise ValueError(f"the prompt '{prompt}' names no colour; expected one of {', '.join(self.names)}")
        return self.names[found[-1]]
