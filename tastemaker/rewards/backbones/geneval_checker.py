"""GenEval's check of an image: detector, color classifier, and the rules applied to both."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from torch import Tensor

from ...core.types import Metadata
from ...data.image_io import to_uint8
from ...evaluation.geneval_rules import CLASSES, DetectedObject, GenEvalRules, evaluate_detections, filter_detections
from .color_classifier import ClipColorClassifier, crop_object
from .instance_segmentation import Instances
from .mask2former import Mask2FormerDetector


@dataclass(frozen=True)
class GenevalResult:
    """What the rules say of a picture, and of what."""

    correct: bool
    reasons: tuple[str, ...]
    kept: dict[str, list[DetectedObject]]
    share: float  # of what was asked for that holds


@dataclass(frozen=True)
class GenevalChecker:
    """Looks at pictures of one size."""

    detector: Mask2FormerDetector
    tints: ClipColorClassifier
    rules: GenEvalRules = GenEvalRules()

    def look(self, pixels: Tensor, facts: Sequence[Metadata]) -> list[GenevalResult]:
        """A ruling for each of the pictures [N, 3, H, W] in [0, 1]."""
        found = self.detector.find(pixels, min(self.rules.threshold, self.rules.counting_threshold))
        seen = [as_detections(row) for row in found]
        colored = self.colored(pixels, found, seen, facts)
        return [apply_rules(detections, fact, self.rules) for detections, fact in zip(colored, facts, strict=True)]

    def colored(
        self,
        pixels: Tensor,
        found: Sequence[Instances],
        seen: Sequence[list[DetectedObject]],
        facts: Sequence[Metadata],
    ) -> list[list[DetectedObject]]:
        """Detections with the colours of those whose colour is asked for."""
        crops, names, places = [], [], []
        for row, (detections, fact) in enumerate(zip(seen, facts, strict=True)):
            wanted = color_candidates(detections, fact, self.rules)
            picture = to_uint8(pixels[row]) if wanted else np.zeros((0, 0, 3), np.uint8)
            for place in wanted:
                mask = found[row].masks[place].cpu().numpy()
                crops.append(crop_object(picture, mask, detections[place].box, self.tints.size))
                names.append(detections[place].name)
                places.append((row, place))
        colored = [list(detections) for detections in seen]
        for (row, place), color in zip(places, self.tints.tell(crops, names), strict=True):
            colored[row][place] = replace(colored[row][place], color=color)
        return colored


def as_detections(found: Instances) -> list[DetectedObject]:
    """Detections as the rules read them."""
    columns = zip(found.label.tolist(), found.boxes.tolist(), found.score.tolist(), strict=True)
    return [DetectedObject(CLASSES[label], (box[0], box[1], box[2], box[3]), score) for label, box, score in columns]


def color_candidates(detections: Sequence[DetectedObject], fact: Metadata, rules: GenEvalRules) -> list[int]:
    """Places of the detections whose colour the rules will look at."""
    wanted = [one for one in fact.get("include", ()) if one.get("color")]
    kept = filter_detections(detections, fact["tag"], rules) if wanted else {}
    chosen = [detection for one in wanted for detection in kept.get(one["class"], [])[: one["count"]]]
    return [place for place, detection in enumerate(detections) if any(detection is one for one in chosen)]


def apply_rules(detections: Sequence[DetectedObject], fact: Metadata, rules: GenEvalRules) -> GenevalResult:
    correct, reasons = evaluate_detections(detections, fact, rules)
    demands = len(fact.get("include", ())) + len(fact.get("exclude", ())) + rules.strict
    return GenevalResult(
        correct, tuple(reasons), filter_detections(detections, fact["tag"], rules), 1 - len(reasons) / demands
    )
