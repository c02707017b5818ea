"""Brightness and color: rewards that can be checked by eye."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from torch import Tensor

from ..core.reward import BatchSize, RewardCard, WeightlessReward
from ..core.toy_colors import TOY_COLORS
from ..core.types import Metadata, Prompts


@dataclass(frozen=True)
class BrightnessReward(WeightlessReward):
    """The mean of all pixels, or minus its distance to a target."""

    target: float | None = None  # in [0, 1]
    batch_size: BatchSize = 64
    card: ClassVar[RewardCard] = RewardCard(range="0 to 1", failure_modes="plain white")
    differentiable: ClassVar[bool] = True

    def score(self, pixels: Tensor, prompts: Prompts, metadata: Sequence[Metadata]) -> Tensor:
        mean = pixels.mean((1, 2, 3, 4))
        return mean if self.target is None else -(mean - self.target).abs()


@dataclass(frozen=True)
class ColorReward(WeightlessReward):
    """One minus the mean distance of the image's mean color to the last color that its prompt names."""

    colors: Mapping[str, tuple[float, float, float]] = field(default_factory=lambda: dict(TOY_COLORS), hash=False)
    batch_size: BatchSize = 64
    card: ClassVar[RewardCard] = RewardCard(range="0 to 1", failure_modes="a plain field of the named color")
    differentiable: ClassVar[bool] = True

    def score(self, pixels: Tensor, prompts: Prompts, metadata: Sequence[Metadata]) -> Tensor:
        targets = pixels.new_tensor([self._target_color(prompt) for prompt in prompts])  # [B, 3]
        return 1 - (pixels.mean((1, 3, 4)) - targets).abs().mean(1)

    def _target_color(self, prompt: str) -> tuple[float, float, float]:
        named = [word for word in re.findall(r"\w+", prompt.lower()) if word in self.colors]
        if not named:
            raise ValueError(
                f"the prompt '{prompt:.80}' does not contain a color; add one of {', '.join(self.colors)} [TM382]"
            )
        return self.colors[named[-1]]
