"""Whether clips of the playground move as their captions say, and what they show while they do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal, Self

import torch
from torch import Tensor

from ..core.reward import BatchSize, Reward, RewardCard, RewardSpec
from ..core.types import Metadata, Placement, Prompts
from ..playground.motion_classifier import MotionClassifier, representative_frame, requested_motion, resize_clips
from ..playground.network_files import TINY, load_network
from .combinators import Combinator


@dataclass(frozen=True)
class PlaygroundMotion:
    """The probability a watcher of whole clips gives the motion asked for; it knows clips that show none."""

    form: Literal["log", "probability"] = "log"  # gradients follow the logarithm better, groups compare the other
    weights: str = "playground/motion0"
    batch_size: BatchSize = 128
    about: ClassVar[RewardCard] = RewardCard(
        range="-10 to 0", hacked_by="blotches that move as asked, whatever they are", memory="0.9 MB"
    )
    differentiable: ClassVar[bool] = True
    reads: ClassVar[Literal["clip"]] = "clip"
    runs_on: ClassVar[Literal["device"]] = "device"

    def load(self, placement: Placement) -> PlaygroundMotionScorer:
        return PlaygroundMotionScorer(self, load_network(MotionClassifier, self.weights, placement.device))

    def tiny(self) -> Self:
        return replace(self, weights=TINY)


@dataclass(frozen=True)
class PlaygroundMotionScorer:
    spec: PlaygroundMotion
    net: MotionClassifier

    def score(self, pixels: Tensor, prompts: Prompts, facts: Sequence[Metadata]) -> Tensor:
        asked = requested_motion(prompts, facts, pixels.device)
        sure: Tensor = self.net(resize_clips(pixels)).log_softmax(1)[
            torch.arange(len(asked), device=asked.device), asked
        ]
        return sure if self.spec.form == "log" else sure.exp()


@dataclass(frozen=True)
class PlaygroundContent(Combinator):
    """A reward of stills, asked of the one frame in which a clip's things are upright and at full size.

    The mean over all frames would want what turns to stand upright all the time, and what grows to be large at once.
    """

    of: RewardSpec

    def __post_init__(self) -> None:
        if self.of.reads == "clip":
            raise ValueError(f"{type(self.of).__name__} reads whole clips, so no frame can be picked; use it by itself")

    @property
    def reads(self) -> Literal["clip"]:
        return "clip"

    def through(self, inner: Reward, pixels: Tensor, prompts: Prompts, facts: Sequence[Metadata]) -> Tensor:
        return inner.score(
            representative_frame(pixels, requested_motion(prompts, facts, pixels.device)), prompts, facts
        )
