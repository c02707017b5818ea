"""GenEval's eyes: a detector, its colours, and the rules over what both say."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from torch import Tensor

from ...geneval import CLASSES, Detection, Rules, keep, verdict
from ...pictures import as_bytes
from ...types import Facts
from .instances import Instances
from .mask2former import Mask2Former
from .tints import Tints, cut


@dataclass(frozen=True)
class Ruling:
    """What the rules say of a picture, and of what."""

    correct: bool
    reasons: tuple[str, ...]
    kept: dict[str, list[Detection]]
    share: float  # of what was asked for that holds


@dataclass(frozen=True)
class Sight:
    """Looks at pictures of one size."""

    detector: Mask2Former
    tints: Tints
    rules: Rules = Rules()

    def look(self, pixels: Tensor, facts: Sequence[Facts]) -> list[Ruling]:
        """A ruling for each of the pictures [N, 3, H, W] in [0, 1]."""
        found = self.detector.find(pixels, min(self.rules.threshold, self.rules.counting_threshold))
        seen = [listed(row) for row in found]
        colored = self.colored(pixels, found, seen, facts)
        return [ruling(detections, fact, self.rules) for detections, fact in zip(colored, facts, strict=True)]

    def colored(
        self, pixels: Tensor, found: Sequence[Instances], seen: Sequence[list[Detection]], facts: Sequence[Facts]
    ) -> list[list[Detection]]:
        """Detections with the colours of those whose colour is asked for."""
        crops, names, places = [], [], []
        for row, (detections, fact) in enumerate(zip(seen, facts, strict=True)):
            wanted = in_question(detections, fact, self.rules)
            picture = as_bytes(pixels[row]) if wanted else np.zeros((0, 0, 3), np.uint8)
            for place in wanted:
                mask = found[row].masks[place].cpu().numpy()
                crops.append(cut(picture, mask, detections[place].box, self.tints.size))
                names.append(detections[place].name)
                places.append((row, place))
        colored = [list(detections) for detections in seen]
        for (row, place), color in zip(places, self.tints.tell(crops, names), strict=True):
            colored[row][place] = replace(colored[row][place], color=color)
        return colored


def listed(found: Instances) -> list[Detection]:
    """Detections as the rules read them."""
    columns = zip(found.label.tolist(), found.boxes.tolist(), found.score.tolist(), strict=True)
    return [Detection(CLASSES[label], (box[0], box[1], box[2], box[3]), score) for label, box, score in columns]


def in_question(detections: Sequence[Detection], fact: Facts, rules: Rules) -> list[int]:
    """Places of the detections whose colour the rules will look at."""
    wanted = [one for one in fact.get("include", ()) if one.get("color")]
    kept = keep(detections, fact["tag"], rules) if wanted else {}
    chosen = [detection for one in wanted for detection in kept.get(one["class"], [])[: one["count"]]]
    return [place for place, detection in enumerate(detections) if any(detection is one for one in chosen)]


def ruling(detections: Sequence[Detection], fact: Facts, rules: Rules) -> Ruling:
    correct, reasons = verdict(detections, fact, rules)
    demands = len(fact.get("include", ())) + len(fact.get("exclude", ())) + rules.strict
    return Ruling(correct, tuple(reasons), keep(detections, fact["tag"], rules), 1 - len(reasons) / demands)
