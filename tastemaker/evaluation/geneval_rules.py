"""GenEval's rules (Ghosh et al. 2023) for detected objects, as pure functions, with a stricter variant."""

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
CLASSES = (  # of COCO, in its order; GenEval renames three
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
    """A detected object: class, box, confidence and, if it was classified, color."""

    name: str
    box: Box
    score: float
    color: str = ""


@dataclass(frozen=True)
class GenEvalRules:
    """Thresholds of the rules, by default the published ones."""

    threshold: float = 0.3
    counting_threshold: float = 0.9
    max_objects: int = 16  # per class
    nms_threshold: float = 1.0  # IoU from which objects of a class are duplicates; 1 keeps all
    position_threshold: float = 0.1  # minimal distance of the centers, relative to both sizes
    strict: bool = False  # also count objects that were not asked for


# Scores of the playground's detectors are nearly 0 or 1, so one threshold serves all tasks.
PLAYEVAL = GenEvalRules(counting_threshold=0.3, strict=True)


def box_iou(a: Box, b: Box) -> float:
    """Intersection over union of boxes that include their last pixels."""
    width = min(a[2], b[2]) - max(a[0], b[0]) + 1
    height = min(a[3], b[3]) - max(a[1], b[1]) + 1
    intersection = max(width, 0.0) * max(height, 0.0)
    areas = sum((box[2] - box[0] + 1) * (box[3] - box[1] + 1) for box in (a, b))
    return intersection / (areas - intersection) if intersection else 0.0


def spatial_relations(a: Box, b: Box, position_threshold: float = GenEvalRules.position_threshold) -> set[str]:
    """Return the relations of `a` to `b`: none, one, or two on a diagonal."""
    offsets = [(a[k] + a[k + 2] - b[k] - b[k + 2]) / 2 for k in (0, 1)]
    sizes = [a[k + 2] - a[k] + b[k + 2] - b[k] for k in (0, 1)]
    excess = [
        math.copysign(max(abs(offset) - position_threshold * size, 0.0), offset)
        for offset, size in zip(offsets, sizes, strict=True)
    ]
    if max(map(abs, excess)) < 1e-3:
        return set()
    x, y = (component / math.hypot(*offsets) for component in excess)
    relations = {"left of": x < -0.5, "right of": x > 0.5, "above": y < -0.5, "below": y > 0.5}
    return {name for name, holds in relations.items() if holds}


def filter_detections(
    detections: Sequence[DetectedObject], tag: str, rules: GenEvalRules = GenEvalRules()
) -> dict[str, list[DetectedObject]]:
    """Return the detections above the threshold by class, the most confident first."""
    threshold = rules.counting_threshold if tag == "counting" else rules.threshold
    kept: dict[str, list[DetectedObject]] = {}
    for name in dict.fromkeys(detection.name for detection in detections):
        # The published evaluation compares in float32, where 0.3 is not above 0.3.
        confident = [d for d in detections if d.name == name and np.float32(d.score) > np.float32(threshold)]
        # As published, the last of several equal scores comes first.
        ordered = sorted(confident, key=lambda d: d.score)[::-1][: rules.max_objects]
        if ordered:
            kept[name] = []
        for detection in ordered:  # without duplicates
            overlaps = (box_iou(detection.box, other.box) for other in kept[name])
            if rules.nms_threshold == 1 or all(overlap < rules.nms_threshold for overlap in overlaps):
                kept[name].append(detection)
    return kept


def validate_metadata(metadata: Metadata, where: str) -> None:
    """Raise an error if the rules cannot be applied to the metadata of a prompt."""
    include, exclude = (metadata.get(name, ()) for name in ("include", "exclude"))
    for entries in (include, exclude):
        if not isinstance(entries, list | tuple) or not all(isinstance(entry, Mapping) for entry in entries):
            raise ConfigError(
                f"{where}: expected a list of objects with 'class' and 'count', got {entries!s:.60}; correct the "
                "metadata [TM614]"
            )
    if not isinstance(metadata.get("tag"), str) or not (include or exclude):
        raise ConfigError(
            f"{where}: 'tag' or 'include' is missing in the metadata; write metadata as GenEval does [TM615]"
        )
    for entry in (*include, *exclude):
        _validate_object(entry, where)
    for index, entry in enumerate(include):
        if "position" in entry:
            _validate_position(entry, index, where)


def _validate_object(entry: Mapping[str, Any], where: str) -> None:
    name, count, color = entry.get("class"), entry.get("count"), entry.get("color", COLORS[0])
    if name not in CLASSES:
        raise ConfigError(
            f"{where}: GenEval does not have the class '{name!s:.60}'{suggest_name(str(name), CLASSES)} [TM616]"
        )
    if not isinstance(count, int) or isinstance(count, bool) or count < 1:
        raise ConfigError(
            f"{where}: expected an integer of at least 1 as the count of '{name}', got {count!s:.20}; correct the "
            "count [TM617]"
        )
    if color not in COLORS:
        raise ConfigError(
            f"{where}: GenEval does not have the color '{color!s:.60}'{suggest_name(str(color), COLORS)} [TM618]"
        )


def _validate_position(entry: Mapping[str, Any], index: int, where: str) -> None:
    position = entry["position"]
    is_pair = isinstance(position, list | tuple) and len(position) == 2
    if not is_pair or position[0] not in RELATIONS or not isinstance(position[1], int) or not 0 <= position[1] < index:
        raise ConfigError(
            f"{where}: expected one of {', '.join(RELATIONS)} and the index of an earlier object as the position "
            f"of '{entry['class']}', got {position!s:.60}; correct the position [TM619]"
        )


def evaluate_detections(
    detections: Sequence[DetectedObject], metadata: Metadata, rules: GenEvalRules = GenEvalRules()
) -> tuple[bool, list[str]]:
    """Return whether an image shows what its metadata ask for, and every reason why not."""
    kept = filter_detections(detections, metadata["tag"], rules)
    reasons: list[str] = []
    groups: list[Sequence[DetectedObject] | None] = []  # of each entry; None if it is not satisfied
    for entry in metadata.get("include", ()):
        objects = kept.get(entry["class"], [])[: entry["count"]]
        reason = _check_entry(entry, objects, groups, rules)
        groups.append(None if reason else objects)
        reasons += [reason] if reason else []
    for entry in metadata.get("exclude", ()):
        count = len(kept.get(entry["class"], ()))
        if count >= entry["count"]:
            reasons.append(f"expected {entry['class']}<{entry['count']}, found {count}")
    if rules.strict:
        # All classes count, so that an image of four cups does not pass for one cup.
        expected = sum(entry["count"] for entry in metadata.get("include", ()))
        total = sum(map(len, kept.values()))
        reasons += [] if total == expected else [f"expected {expected} objects in all, found {total}"]
    return not reasons, reasons


def _check_entry(
    entry: Mapping[str, Any],
    objects: Sequence[DetectedObject],
    groups: Sequence[Sequence[DetectedObject] | None],
    rules: GenEvalRules,
) -> str:
    """Return what is wrong with the objects detected for one entry of `include`, or an empty text."""
    name, count, color = entry["class"], entry["count"], entry.get("color")
    if len(objects) < count:
        return f"expected {name}>={count}, found {len(objects)}"
    colors = [detection.color for detection in objects]
    if color and colors.count(color) < count:
        others = ", ".join(f"{colors.count(c)} {c}" for c in COLORS if c in colors)
        return f"expected {color} {name}>={count}, found {colors.count(color)} {color}; and {others}"
    if "position" in entry:
        relation, index = entry["position"]
        return _check_position(name, relation, objects, groups[index], rules.position_threshold)
    return ""


def _check_position(
    name: str,
    relation: str,
    objects: Sequence[DetectedObject],
    targets: Sequence[DetectedObject] | None,
    position_threshold: float,
) -> str:
    if targets is None:
        return f"no target for {name} to be {relation}"
    for detection in objects:
        for target in targets:
            relations = spatial_relations(detection.box, target.box, position_threshold)
            if relation not in relations:
                return f"expected {name} {relation} target, found {' and '.join(sorted(relations))} target"
    return ""
