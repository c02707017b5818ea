"""Whether a detector finds what a picture is to show, or to leave out (VADER; GenEval)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field
from torch import Tensor

from ..core.reward import BatchSize, RewardCard
from ..core.types import Metadata, Placement, Prompts
from .backbones.detection_scores import (
    geneval_shares,
    mean_confidence,
    requested_objects,
    required_objects,
    with_threshold,
)
from .backbones.detectors import TINY_DINO, TINY_YOLOS, YOLOS, ObjectDetector, load_detector, published_source


@dataclass(frozen=True)
class DetectionReward:
    """How surely a detector finds what is wanted, or whether it stands as it should. `confidence`: the mean probability
    of what is found by the name, as VADER has it; `best`: that of the likeliest place, with a gradient even if nothing
    is found; `verdict`: GenEval's rules of counts and positions, by the facts `include` and `exclude`; `graded`: the
    share of them that holds."""

    weights: str = YOLOS.hub  # or -tiny, IDEA-Research/grounding-dino-base, or -tiny, or an EfficientDet-Lite's .tflite
    form: Literal["confidence", "best", "verdict", "graded"] = "confidence"
    target: str = ""  # `book`, or `book. cup.`; else the fact `object`, GenEval's `include`, or what the prompt names
    want: Literal["present", "absent"] = "present"  # absent is VADER's: 1 - confidence
    threshold: Annotated[float, Field(ge=0, lt=1)] | None = None  # VADER's .2 for YOLOS, .4 for DINO; else GenEval's
    strict: bool = False  # by the rules nothing else may be there
    height: Annotated[int, Field(ge=96, le=2048)] = 512  # pixels that pictures are brought to
    batch_size: BatchSize = 16
    reads: ClassVar[Literal["frames"]] = "frames"

    @property
    def about(self) -> RewardCard:
        hacked = "by confidence, textures that only a detector takes for the thing; by the rules, many copies"
        memory = "0.5 GB (YOLOS base) or 0.9 GB (Grounding DINO base)"
        return RewardCard("0 to 1", hacked, memory, (published_source(self.weights),))

    @property
    def runs_on(self) -> Literal["device", "host"]:
        return "host" if self.weights.endswith(".tflite") else "device"

    @property
    def differentiable(self) -> bool:
        return self.form in ("confidence", "best") and self.runs_on == "device"

    def load(self, placement: Placement) -> DetectionScorer:
        return DetectionScorer(self, load_detector(self.weights, placement))

    def tiny(self) -> Self:
        weights = TINY_DINO if "dino" in self.weights.lower() else TINY_YOLOS
        return replace(self, weights=weights, height=96, target="cat" if self.form in ("confidence", "best") else "")


@dataclass(frozen=True)
class DetectionScorer:
    spec: DetectionReward
    net: ObjectDetector

    def score(self, pixels: Tensor, prompts: Prompts, facts: Sequence[Metadata]) -> Tensor:
        by_rules = self.spec.form in ("verdict", "graded")
        score = (self._verdict if by_rules else self._confidence)(pixels, prompts, facts)
        return score if self.spec.want == "present" else 1 - score

    def _confidence(self, pixels: Tensor, prompts: Prompts, facts: Sequence[Metadata]) -> Tensor:
        spec, rows = self.spec, zip(prompts, facts, strict=True)
        names = [requested_objects(spec.target, prompt, fact, self.net.names) for prompt, fact in rows]
        least = self.net.enough if spec.threshold is None else spec.threshold
        return mean_confidence(
            self.net.find(pixels[:, 0], names, spec.height), names, None if spec.form == "best" else least
        )

    def _verdict(self, pixels: Tensor, prompts: Prompts, facts: Sequence[Metadata]) -> Tensor:
        spec, rules = self.spec, with_threshold(self.net.rules, self.spec.threshold, self.spec.strict)
        names = [required_objects(*row, self.net.names, spec.strict) for row in zip(prompts, facts, strict=True)]
        found = self.net.find(pixels[:, 0], names, spec.height)
        shares = geneval_shares(found, names, facts, rules, (pixels.shape[-2], pixels.shape[-1]))
        return shares if spec.form == "graded" else shares.floor()
