"""Whether a picture of the playground shows its caption, by a detector and GenEval's rules."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal, Self

from torch import Tensor

from ..core.reward import BatchSize, RewardCard
from ..core.types import Metadata, Placement, Prompts
from ..playground.blocks import first_frame
from ..playground.caption_encoder import requested_captions
from ..playground.detector import SceneDetector, decode_detections
from ..playground.network_files import TINY, load_network
from ..playground.verdict import partial_credit, verdict


@dataclass(frozen=True)
class PlaygroundVerdict:
    """PlayEval's verdict, partial credit for every part that is right, or the mean of both, which learns fastest."""

    form: Literal["verdict", "graded", "mix"] = "mix"
    strict: bool = True  # things nobody asked for count as wrong; GenEval's own rule forgives them, and is cheated so
    weights: str = "playground/detector0"
    batch_size: BatchSize = 256
    about: ClassVar[RewardCard] = RewardCard(
        range="0 to 1", hacked_by="without `strict`, four copies of everything", memory="2.4 MB"
    )
    differentiable: ClassVar[bool] = False
    reads: ClassVar[Literal["frames"]] = "frames"
    runs_on: ClassVar[Literal["device"]] = "device"

    def load(self, placement: Placement) -> PlaygroundVerdictScorer:
        return PlaygroundVerdictScorer(self, load_network(SceneDetector, self.weights, placement.device))

    def tiny(self) -> Self:
        return replace(self, weights=TINY)


@dataclass(frozen=True)
class PlaygroundVerdictScorer:
    spec: PlaygroundVerdict
    net: SceneDetector

    def score(self, pixels: Tensor, prompts: Prompts, facts: Sequence[Metadata]) -> Tensor:
        captions = requested_captions(prompts, facts, pixels.device)
        found = decode_detections(self.net(first_frame(pixels)))
        if self.spec.form == "verdict":
            return verdict(found, captions, self.spec.strict)
        credit = partial_credit(found, captions, self.spec.strict)
        return credit if self.spec.form == "graded" else (credit + verdict(found, captions, self.spec.strict)) / 2
