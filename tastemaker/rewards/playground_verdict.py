"""Whether a picture of the playground shows its caption, by a detector and GenEval's rules."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal, Self

from torch import Tensor

from ..playground.blocks import still
from ..playground.detector import Detector, detections
from ..playground.reading import asked
from ..playground.trained import TINY, load
from ..playground.verdict import graded, verdict
from ..reward import About, Rows
from ..types import Facts, Placement, Prompts


@dataclass(frozen=True)
class PlaygroundVerdict:
    """PlayEval's verdict, partial credit for every part that is right, or the mean of both, which learns fastest."""

    form: Literal["verdict", "graded", "mix"] = "mix"
    strict: bool = True  # things nobody asked for count as wrong; GenEval's own rule forgives them, and is cheated so
    weights: str = "playground/detector0"
    batch_size: Rows = 256
    about: ClassVar[About] = About(
        range="0 to 1", hacked_by="without `strict`, four copies of everything", memory="2.4 MB"
    )
    differentiable: ClassVar[bool] = False
    reads: ClassVar[Literal["frames"]] = "frames"
    runs_on: ClassVar[Literal["device"]] = "device"

    def load(self, placement: Placement) -> VerdictScorer:
        return VerdictScorer(self, load(Detector, self.weights, placement.device))

    def tiny(self) -> Self:
        return replace(self, weights=TINY)


@dataclass(frozen=True)
class VerdictScorer:
    spec: PlaygroundVerdict
    net: Detector

    def score(self, pixels: Tensor, prompts: Prompts, facts: Sequence[Facts]) -> Tensor:
        captions = asked(prompts, facts, pixels.device)
        found = detections(self.net(still(pixels)))
        if self.spec.form == "verdict":
            return verdict(found, captions, self.spec.strict)
        credit = graded(found, captions, self.spec.strict)
        return credit if self.spec.form == "graded" else (credit + verdict(found, captions, self.spec.strict)) / 2
