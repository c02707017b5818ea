"""Object detection: whether a detector finds the requested objects, or none of the excluded ones (VADER; GenEval)."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Literal, Self

import torch
from pydantic import Field
from torch import Tensor

from ..core.reward import BatchSize, Reward, RewardCard, RewardSpec
from ..core.types import Metadata, Placement, Prompts
from ..evaluation.geneval_rules import DetectedObject, GenEvalRules, evaluate_detections
from .backbones.detectors import (
    COCO_NAMES,
    TINY_DINO,
    TINY_YOLOS,
    YOLOS,
    DetectorOutput,
    ObjectDetector,
    ObjectNames,
    load_detector,
    published_source,
)


@dataclass(frozen=True)
class DetectionReward(RewardSpec):
    """Confidence of a detector in the requested objects, or GenEval's rules on what it detects.

    `confidence`: the mean probability of the detections with the right name, as in VADER. `best`: that of the best box,
    with a gradient even if nothing is detected. `verdict`: GenEval's rules of counts and positions, by the metadata
    fields `include` and `exclude`. `graded`: the fraction of the requirements that hold.
    """

    weights: str = YOLOS.hub  # or -tiny, IDEA-Research/grounding-dino-base or -tiny, or a .tflite of EfficientDet-Lite
    output: Literal["confidence", "best", "verdict", "graded"] = "confidence"
    objects: str = ""  # `book`, or `book. cup.`; else the metadata `object` or `include`, or the prompt's objects
    expect: Literal["present", "absent"] = "present"  # absent: 1 - confidence, as in VADER
    threshold: Annotated[float, Field(ge=0, lt=1)] | None = None  # VADER's .2 for YOLOS, .4 for DINO; else GenEval's
    strict: bool = False  # the rules allow no other objects
    image_height: Annotated[int, Field(ge=96, le=2048)] = 512  # pixels of the detector's input
    batch_size: BatchSize = 16

    @property
    def card(self) -> RewardCard:
        failure_modes = "by confidence, textures that only a detector takes for the object; by the rules, many copies"
        memory = "0.5 GB (YOLOS base) or 0.9 GB (Grounding DINO base)"
        return RewardCard("0 to 1", failure_modes, memory, (published_source(self.weights),))

    @property
    def runs_on(self) -> Literal["device", "host"]:
        return "host" if self.weights.endswith(".tflite") else "device"

    @property
    def differentiable(self) -> bool:
        return self.output in ("confidence", "best") and self.runs_on == "device"

    def load(self, placement: Placement) -> DetectionScorer:
        return DetectionScorer(self, load_detector(self.weights, placement))

    def tiny(self) -> Self:
        weights = TINY_DINO if "dino" in self.weights.lower() else TINY_YOLOS
        objects = "cat" if self.output in ("confidence", "best") else ""
        return replace(self, weights=weights, image_height=96, objects=objects)


@dataclass(frozen=True)
class DetectionScorer(Reward):
    spec: DetectionReward
    net: ObjectDetector

    def score(self, pixels: Tensor, prompts: Prompts, metadata: Sequence[Metadata]) -> Tensor:
        by_rules = self.spec.output in ("verdict", "graded")
        score = (self._verdict if by_rules else self._confidence)(pixels, prompts, metadata)
        return score if self.spec.expect == "present" else 1 - score

    def _confidence(self, pixels: Tensor, prompts: Prompts, metadata: Sequence[Metadata]) -> Tensor:
        names = [
            requested_objects(self.spec.objects, prompt, fields, self.net.names)
            for prompt, fields in zip(prompts, metadata, strict=True)
        ]
        output = self.net.detect(pixels[:, 0], names, self.spec.image_height)
        if self.spec.output == "best":
            return mean_confidence(output, names, None)
        threshold = self.net.default_threshold if self.spec.threshold is None else self.spec.threshold
        return mean_confidence(output, names, threshold)

    def _verdict(self, pixels: Tensor, prompts: Prompts, metadata: Sequence[Metadata]) -> Tensor:
        rules = replace(self.net.rules, strict=self.spec.strict)
        if self.spec.threshold is not None:  # one for everything
            rules = replace(rules, threshold=self.spec.threshold, counting_threshold=self.spec.threshold)
        names = [
            required_objects(prompt, fields, self.net.names, self.spec.strict)
            for prompt, fields in zip(prompts, metadata, strict=True)
        ]
        output = self.net.detect(pixels[:, 0], names, self.spec.image_height)
        fractions = geneval_fractions(output, names, metadata, rules, (pixels.shape[-2], pixels.shape[-1]))
        return fractions if self.spec.output == "graded" else fractions.floor()


def requested_objects(objects: str, prompt: str, metadata: Metadata, known: Sequence[str]) -> list[str]:
    """The names to look for: from the setting, the metadata `object` or `include`, or else those in the prompt."""
    text = objects or str(metadata.get("object", ""))
    if text:
        return split_phrases(text)
    included = [str(entry["class"]).lower() for entry in metadata.get("include", ())]
    if included:
        return list(dict.fromkeys(included))
    names = objects_in_prompt(prompt, known) if known else split_phrases(prompt)
    if not names:
        raise ValueError(
            f"prompt '{prompt:.80}' does not name an object that the detector has; set `objects`, or add 'object' "
            "to the metadata [TM384]"
        )
    return names


def split_phrases(text: str) -> list[str]:
    """`Book. Cup.` as names."""
    return [name for part in text.lower().split(".") if (name := " ".join(part.split()))]


def objects_in_prompt(prompt: str, known: Sequence[str]) -> list[str]:
    """The known names in a prompt; of names within others (`dog` in `hot dog`) only the longer."""
    remaining, names = prompt.lower(), []
    for name in sorted(known, key=len, reverse=True):
        pattern = rf"\b{re.escape(name)}(?:e?s)?\b"
        if re.search(pattern, remaining):
            names.append(name)
            remaining = re.sub(pattern, " ", remaining)
    return names


def mean_confidence(output: DetectorOutput, names: ObjectNames, threshold: float | None) -> Tensor:
    """Mean score of the boxes above the threshold, or without one the best score, averaged over an image's names: [N].

    A name without a box above the threshold scores zero.
    """
    if threshold is None:
        scores = output.scores.amax(1)
    else:
        kept = output.is_top & (output.scores > threshold)
        scores = (output.scores * kept).sum(1) / kept.sum(1).clamp(min=1)
    return scores.sum(1) / torch.tensor([len(row) for row in names], device=scores.device)


def required_objects(prompt: str, metadata: Metadata, known: Sequence[str], strict: bool) -> list[str]:
    """All names that GenEval's rules need; if strict, every name that the detector knows."""
    entries = [*metadata.get("include", ()), *metadata.get("exclude", ())]
    if not entries:
        raise ValueError(
            f"prompt '{prompt:.80}' does not have 'include' or 'exclude' in its metadata; add them as in GenEval "
            "[TM385]"
        )
    if any(entry.get("color") for entry in entries):
        raise ValueError(
            f"prompt '{prompt:.80}' asks for a color, but detectors do not recognize colors; remove such prompts "
            "[TM386]"
        )
    names = list(dict.fromkeys(str(entry["class"]) for entry in entries))
    taken = {COCO_NAMES.get(name, name) for name in names}
    return names + [name for name in known if strict and name not in taken]


def geneval_fractions(
    output: DetectorOutput, names: ObjectNames, metadata: Sequence[Metadata], rules: GenEvalRules, size: tuple[int, int]
) -> Tensor:
    """The fraction of each image's requirements that hold: [N]. `size` is that of the images, (H, W)."""
    height, width = size
    scale = output.boxes.new_tensor([width, height, width, height])
    columns = (output.boxes * scale).tolist(), output.scores.tolist(), output.is_top.tolist()
    fractions = []
    for boxes, scores, is_top, row, fields in zip(*columns, names, metadata, strict=True):
        detections = [
            DetectedObject(name, (box[0], box[1], box[2], box[3]), score)
            for box, box_scores, box_tops in zip(boxes, scores, is_top, strict=True)
            for name, score, top in zip(row, box_scores, box_tops, strict=False)  # an image may have fewer names
            if top
        ]
        reasons = evaluate_detections(detections, {"tag": "", **fields}, rules)[1]
        requirements = len(fields.get("include", ())) + len(fields.get("exclude", ())) + rules.strict
        fractions.append(1 - len(reasons) / requirements)
    finite = output.scores.isfinite().all(2).all(1)  # NaN pixels must not get a verdict
    return output.scores.new_tensor(fractions).where(finite, float("nan"))
