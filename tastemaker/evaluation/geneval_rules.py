"""GenEval's rules (Ghosh et al. 2023) over what a detector found, as pure functions; a strict form that counts too."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..core.registry import ConfigError, suggest_name
from ..core.types import Metadata

TASKS = ("single_object", "two_object", "counting", "colors", "position", "color_attr")
# fmt: off
CLASSES = (  # COCO's in its order; three have names of GenEval's own
    "person", "bicycle", "car", "motorcycle", "airplane", "bus", "train", "truck", "boat", "traffic light",
    "fire hydrant", "stop sign", "parking meter", "bench", "bird", "cat", "dog", "horse", "sheep", "cow", "elephant",
    "bear", "zebra", "giraffe", "backpack", "umbrella", "handbag", "tie", "suitcase", "frisbee", "skis", "snowboard",
    "sports ball", "kite", "baseball bat", "baseball glove", "skateboard", "surfboard", "tennis racket", "bottle",
    "wine glass", "cup", "fork", "knife", "spoon", "bowl", "banana", "apple", "sandwich", "orange", "broccoli",
    "carrot", "hot dog", "pizza", "donut", "cake", "chair", "couch", "potted plant", "bed", "dining table", "toilet",
    "tv", "laptop", "computer mouse", "tv remote", "computer keyboard", "cell phone", "microwave", "oven", "toaster",
    "sink", "refrigerator", "book", "clock", "vase", "scissors", "teddy bear", "hair drier", "toothbrush",
)
# fmt: on
RELATIONS = ("left of", "right of", "above", "below")
COLORS = ("red", "orange", "yellow", "green", "blue", "purple", "pink", "brown", "black", "white")
Box = tuple[float, float, float, float]  # left, top, right, bottom in pixels


@dataclass(frozen=True)
class DetectedObject:
    """One object: what it is, where, how sure the detector is, and its colour if that was asked."""

    name: str
    box: Box
    score: float
    color: str = ""


@dataclass(frozen=True)
class GenEvalRules:
    """The published settings; `strict` adds that no object may be there that was not asked for."""

    threshold: float = 0.3
    counting_threshold: float = 0.9
    most: int = 16  # objects of a class
    overlap: float = 1.0  # objects of a class that overlap so much are one; 1 keeps them all
    offset: float = 0.1  # of both sizes: how far apart centres must be to stand in a relation
    strict: bool = False


# Heats of a detector of the playground's are nearly 0 or 1, so one threshold serves all tasks.
PLAYEVAL = GenEvalRules(counting_threshold=0.3, strict=True)

DetectionsByClass = Mapping[str, Sequence[DetectedObject]]


def box_iou(a: Box, b: Box) -> float:
    """Overlap of two boxes whose last pixels belong to them."""
    width = min(a[2], b[2]) - max(a[0], b[0]) + 1
    height = min(a[3], b[3]) - max(a[1], b[1]) + 1
    shared = max(width, 0.0) * max(height, 0.0)
    areas = sum((box[2] - box[0] + 1) * (box[3] - box[1] + 1) for box in (a, b))
    return shared / (areas - shared) if shared else 0.0


def spatial_relations(a: Box, b: Box, offset: float = GenEvalRules.offset) -> set[str]:
    """In which relations `a` stands to `b`: none, one, or two on a diagonal."""
    apart = [(a[k] + a[k + 2] - b[k] - b[k + 2]) / 2 for k in (0, 1)]
    sizes = [a[k + 2] - a[k] + b[k + 2] - b[k] for k in (0, 1)]
    beyond = [math.copysign(max(abs(d) - offset * size, 0.0), d) for d, size in zip(apart, sizes, strict=True)]
    if max(map(abs, beyond)) < 1e-3:
        return set()
    x, y = (part / math.hypot(*apart) for part in beyond)
    holds = {"left of": x < -0.5, "right of": x > 0.5, "above": y < -0.5, "below": y > 0.5}
    return {name for name, held in holds.items() if held}


def filter_detections(
    detections: Sequence[DetectedObject], tag: str, rules: GenEvalRules = GenEvalRules()
) -> dict[str, list[DetectedObject]]:
    """The detections that count, by class, the surest first."""
    threshold = rules.counting_threshold if tag == "counting" else rules.threshold
    kept: dict[str, list[DetectedObject]] = {}
    for name in dict.fromkeys(detection.name for detection in detections):
        # In float32, in which the published evaluation compares: 0.3 is not above 0.3.
        sure = [d for d in detections if d.name == name and np.float32(d.score) > np.float32(threshold)]
        waiting = sorted(sure, key=lambda d: d.score)[::-1][: rules.most]  # of equals the last is first, as published
        if waiting:
            kept[name] = _suppressed(waiting, rules.overlap)
    return kept


def _suppressed(waiting: Sequence[DetectedObject], overlap: float) -> list[DetectedObject]:
    chosen: list[DetectedObject] = []
    for detection in waiting:
        if overlap == 1 or all(box_iou(detection.box, d.box) < overlap for d in chosen):
            chosen.append(detection)
    return chosen


def validate_metadata(facts: Metadata, where: str) -> None:
    """Refuse metadata that the rules cannot be applied to."""
    include, exclude = (facts.get(name, ()) for name in ("include", "exclude"))
    for part in (include, exclude):
        if not isinstance(part, list | tuple) or not all(isinstance(one, Mapping) for one in part):
            found = f"{part}"
            raise ConfigError(f"{where}: objects are {found:.60}; expected a list of mappings with 'class' and 'count'")
    if not isinstance(facts.get("tag"), str) or not (include or exclude):
        raise ConfigError(f"{where}: metadata have no 'tag' or no 'include'; expected those of GenEval's layout")
    for one in (*include, *exclude):
        _known(one, where)
    for place, one in enumerate(include):
        if "position" in one:
            _placed(one, place, where)


def _known(wanted: Mapping[str, Any], where: str) -> None:
    name, count, color = wanted.get("class"), wanted.get("count"), wanted.get("color", COLORS[0])
    if name not in CLASSES:
        raise ConfigError(f"{where}: GenEval knows no class '{name!s:.60}'{suggest_name(str(name), CLASSES)}")
    if not isinstance(count, int) or isinstance(count, bool) or count < 1:
        raise ConfigError(f"{where}: the count of '{name}' is {count!s:.20}; expected a whole number from 1")
    if color not in COLORS:
        raise ConfigError(f"{where}: GenEval knows no colour '{color!s:.60}'{suggest_name(str(color), COLORS)}")


def _placed(wanted: Mapping[str, Any], place: int, where: str) -> None:
    told = wanted["position"]
    whole = isinstance(told, list | tuple) and len(told) == 2 and told[0] in RELATIONS and isinstance(told[1], int)
    if not whole or not 0 <= told[1] < place:
        found = f"{told}"
        raise ConfigError(
            f"{where}: the position of '{wanted['class']}' is {found:.60}; expected one of {', '.join(RELATIONS)}, "
            "and the number of an object before it"
        )


def evaluate_detections(
    detections: Sequence[DetectedObject], facts: Metadata, rules: GenEvalRules = GenEvalRules()
) -> tuple[bool, list[str]]:
    """Whether the picture shows what its metadata ask for, and every reason why not."""
    kept = filter_detections(detections, facts["tag"], rules)
    reasons: list[str] = []
    groups: list[Sequence[DetectedObject] | None] = []
    for wanted in facts.get("include", ()):
        found = kept.get(wanted["class"], [])[: wanted["count"]]
        wrong = _complaint(wanted, found, groups, rules)
        groups.append(None if wrong else found)
        reasons += [wrong] if wrong else []
    for unwanted in facts.get("exclude", ()):
        count = len(kept.get(unwanted["class"], ()))
        if count >= unwanted["count"]:
            reasons.append(f"expected {unwanted['class']}<{unwanted['count']}, found {count}")
    if rules.strict:
        reasons += _surplus(kept, facts)
    return not reasons, reasons


def _complaint(
    wanted: Mapping[str, Any],
    found: Sequence[DetectedObject],
    groups: Sequence[Sequence[DetectedObject] | None],
    rules: GenEvalRules,
) -> str:
    """What is wrong with the objects found for one entry of `include`; empty if nothing."""
    name, count = wanted["class"], wanted["count"]
    if len(found) < count:
        return f"expected {name}>={count}, found {len(found)}"
    colors = [detection.color for detection in found]
    color = wanted.get("color")
    if color and colors.count(color) < count:
        others = ", ".join(f"{colors.count(c)} {c}" for c in COLORS if c in colors)
        return f"expected {color} {name}>={count}, found {colors.count(color)} {color}; and {others}"
    if "position" in wanted:
        relation, index = wanted["position"]
        return _misplaced(name, relation, found, groups[index], rules.offset)
    return ""


def _misplaced(
    name: str, relation: str, found: Sequence[DetectedObject], targets: Sequence[DetectedObject] | None, offset: float
) -> str:
    if targets is None:
        return f"no target for {name} to be {relation}"
    for detection in found:
        for target in targets:
            true = spatial_relations(detection.box, target.box, offset)
            if relation not in true:
                return f"expected {name} {relation} target, found {' and '.join(sorted(true))} target"
    return ""


def _surplus(kept: DetectionsByClass, facts: Metadata) -> list[str]:
    """Every object counts, asked for or not: a picture of four cups is none of one cup."""
    asked = sum(wanted["count"] for wanted in facts.get("include", ()))
    found = sum(len(detections) for detections in kept.values())
    return [] if found == asked else [f"expected {asked} objects in all, found {found}"]
