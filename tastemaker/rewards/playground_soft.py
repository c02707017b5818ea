"""The playground's verdict as a gradient can follow it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal, Self

from torch import Tensor

from ..playground.blocks import still
from ..playground.detector import Detector
from ..playground.reading import asked
from ..playground.soft import soft_score
from ..playground.trained import TINY, load
from ..reward import About, Rows
from ..types import Facts, Placement, Prompts


@dataclass(frozen=True)
class PlaygroundSoft:
    """Mean log-probability a detector gives what the caption asks for, less what is there beside it; at most 0."""

    strict: bool = True  # things nobody asked for cost
    weights: str = "playground/detector0"
    batch_size: Rows = 256
    about: ClassVar[About] = About(
        range="-10 to 0", hacked_by="hard outlines; without `strict`, four copies of everything", memory="2.4 MB"
    )
    differentiable: ClassVar[bool] = True
    reads: ClassVar[Literal["frames"]] = "frames"
    runs_on: ClassVar[Literal["device"]] = "device"

    def load(self, placement: Placement) -> SoftScorer:
        return SoftScorer(self, load(Detector, self.weights, placement.device))

    def tiny(self) -> Self:
        return replace(self, weights=TINY)


@dataclass(frozen=True)
class SoftScorer:
    spec: PlaygroundSoft
    net: Detector

    def score(self, pixels: Tensor, prompts: Prompts, facts: Sequence[Facts]) -> Tensor:
        return soft_score(self.net(still(pixels)), asked(prompts, facts, pixels.device), self.spec.strict)
