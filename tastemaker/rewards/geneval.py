"""GenEval as a reward: whether a picture shows what its metadata ask for, colours too."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field
from torch import Tensor

from ..core.reward import BatchSize, RewardCard
from ..core.types import Metadata, Placement, Prompts
from ..evaluation.geneval_rules import GenEvalRules, validate_metadata
from .backbones.color_classifier import CLIP_L, load_color_classifier
from .backbones.detector_selftest import require_selftest
from .backbones.geneval_checker import GenevalChecker
from .backbones.loading import TINY
from .backbones.mask2former import load_mask2former
from .backbones.published_files import DETECTOR

Share = Annotated[float, Field(ge=0, le=1)]


@dataclass(frozen=True)
class Geneval:
    """GenEval's verdict of a picture, by its metadata as facts. `graded` is the share of what was asked for that
    holds; `strict` lets nothing be there that was not asked for, which keeps four copies from passing for one."""

    weights: str = DETECTOR.name  # mmdet's as published; or its path, or a folder of a mask2former on the hub
    colors: str = CLIP_L.hub  # who tells them
    form: Literal["verdict", "graded"] = "verdict"
    strict: bool = False
    threshold: Share = 0.3
    counting_threshold: Share = 0.9
    most: BatchSize = 16  # objects of a class
    overlap: Share = 1.0  # from which two objects are one; 1 keeps them all
    offset: Annotated[float, Field(ge=0)] = 0.1  # of both sizes: how far apart centres must be to stand in a relation
    trial: bool = True  # whether the detector must know drawings of things before it judges
    batch_size: BatchSize = 8
    about: ClassVar[RewardCard] = RewardCard(
        range="0 to 1",
        hacked_by="many copies of what is asked for, unless strict; textures that only this detector takes for things",
        memory="0.3 GB (Mask2Former Swin-S of mmdet) and 1.7 GB (CLIP)",
        sources=(CLIP_L,),
    )
    differentiable: ClassVar[bool] = False
    reads: ClassVar[Literal["frames"]] = "frames"
    runs_on: ClassVar[Literal["device"]] = "device"

    @property
    def rules(self) -> GenEvalRules:
        return GenEvalRules(self.threshold, self.counting_threshold, self.most, self.overlap, self.offset, self.strict)

    def load(self, placement: Placement) -> GenevalScorer:
        sight = GenevalChecker(
            load_mask2former(self.weights, placement), load_color_classifier(self.colors, placement), self.rules
        )
        if self.trial:
            require_selftest(sight, placement)
        return GenevalScorer(self, sight)

    def tiny(self) -> Self:
        return replace(self, weights=TINY, colors=TINY, trial=False)


@dataclass(frozen=True)
class GenevalScorer:
    spec: Geneval
    sight: GenevalChecker

    def score(self, pixels: Tensor, prompts: Prompts, facts: Sequence[Metadata]) -> Tensor:
        for prompt, fact in zip(prompts, facts, strict=True):
            validate_metadata(fact, f"'{prompt:.80}'")
        told = self.sight.look(pixels[:, 0], facts)
        return pixels.new_tensor([r.share if self.spec.form == "graded" else float(r.correct) for r in told])
