"""The playground's verdict as a gradient can follow it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal, Self

from torch import Tensor

from ..core.reward import BatchSize, RewardCard
from ..core.types import Metadata, Placement, Prompts
from ..playground.blocks import first_frame
from ..playground.caption_encoder import requested_captions
from ..playground.detector import SceneDetector
from ..playground.network_files import TINY, load_network
from ..playground.soft_verdict import soft_score


@dataclass(frozen=True)
class PlaygroundSoft:
    """Mean log-probability a detector gives what the caption asks for, less what is there beside it; at most 0."""

    strict: bool = True  # things nobody asked for cost
    weights: str = "playground/detector0"
    batch_size: BatchSize = 256
    about: ClassVar[RewardCard] = RewardCard(
        range="-10 to 0", hacked_by="hard outlines; without `strict`, four copies of everything", memory="2.4 MB"
    )
    differentiable: ClassVar[bool] = True
    reads: ClassVar[Literal["frames"]] = "frames"
    runs_on: ClassVar[Literal["device"]] = "device"

    def load(self, placement: Placement) -> PlaygroundSoftScorer:
        return PlaygroundSoftScorer(self, load_network(SceneDetector, self.weights, placement.device))

    def tiny(self) -> Self:
        return replace(self, weights=TINY)


@dataclass(frozen=True)
class PlaygroundSoftScorer:
    spec: PlaygroundSoft
    net: SceneDetector

    def score(self, pixels: Tensor, prompts: Prompts, facts: Sequence[Metadata]) -> Tensor:
        return soft_score(
            self.net(first_frame(pixels)), requested_captions(prompts, facts, pixels.device), self.spec.strict
        )
