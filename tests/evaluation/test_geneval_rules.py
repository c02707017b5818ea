"""The GenEval rules reproduce recorded verdicts of the published evaluation."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tastemaker.evaluation.geneval_rules import (
    COLORS,
    Box,
    DetectedObject,
    GenEvalRules,
    box_iou,
    evaluate_detections,
    filter_detections,
    spatial_relations,
)

GOLDEN: dict[str, Any] = json.loads((Path(__file__).parents[1] / "fixtures/showo/geneval.json").read_text("utf-8"))


def read_detections(case: dict[str, Any]) -> list[DetectedObject]:
    objects = []
    for name, numbers, color in case["detections"]:
        left, top, right, bottom, score = np.float32(numbers).tolist()  # boxes are float32 there
        objects.append(DetectedObject(name, (left, top, right, bottom), score, color))
    return objects


def build_rules(options: Sequence[Any]) -> GenEvalRules:
    nms_threshold, threshold, position_threshold, max_objects = options
    return GenEvalRules(
        threshold=threshold,
        nms_threshold=nms_threshold,
        position_threshold=position_threshold,
        max_objects=max_objects,
    )


def lines(reason: str) -> list[Any]:
    """Reasons in order, the words of each sorted, because relations are printed in the order of a set."""
    return [sorted(line.split()) for line in reason.splitlines()]


def check_reproduced(case: dict[str, Any], golden: dict[str, Any], rules: GenEvalRules) -> None:
    objects, metadata = read_detections(case), case["metadata"]
    kept = {
        name: [[*d.box, d.score] for d in group]
        for name, group in filter_detections(objects, metadata["tag"], rules).items()
    }
    assert kept == golden["kept"]
    correct, reasons = evaluate_detections(objects, metadata, rules)
    assert correct == golden["correct"]
    assert lines("\n".join(reasons)) == lines(golden["reason"])


def test_published_verdicts_are_reproduced() -> None:
    for case in GOLDEN["cases"]:
        check_reproduced(case, case, GenEvalRules())


def find_case(golden: dict[str, Any]) -> dict[str, Any] | None:
    """The case of a verdict with other settings, found by its boxes: its number refers to a longer list of cases."""
    boxes = {tuple(box) for group in golden["kept"].values() for box in group}
    for case in GOLDEN["cases"]:
        if boxes and boxes <= {(*d.box, d.score) for d in read_detections(case)}:
            match: dict[str, Any] = case
            return match
    return None


def test_published_verdicts_with_other_settings_are_reproduced() -> None:
    variants = [(golden, case) for golden in GOLDEN["option_variants"] if (case := find_case(golden))]
    assert len(variants) == 10  # the other cases were not recorded
    for golden, case in variants:
        check_reproduced(case, golden, build_rules(golden["opts"]))


def test_filtering_is_idempotent_with_other_settings() -> None:
    for golden in GOLDEN["option_variants"]:
        rules = build_rules(golden["opts"])
        objects = [DetectedObject(name, tuple(b[:4]), b[4]) for name, group in golden["kept"].items() for b in group]
        groups = filter_detections(objects, "", rules)
        kept = {name: [[*d.box, d.score] for d in group] for name, group in groups.items()}
        assert kept == golden["kept"]


@pytest.mark.parametrize("options", sorted({tuple(golden["opts"]) for golden in GOLDEN["option_variants"]}))
def test_filtering_follows_the_settings_on_every_recorded_case(options: tuple[float, float, float, int]) -> None:
    rules = build_rules(options)
    for case in GOLDEN["cases"]:
        objects, tag = read_detections(case), case["metadata"]["tag"]
        min_score = 0.9 if tag == "counting" else rules.threshold
        for name, group in filter_detections(objects, tag, rules).items():
            named = [d for d in objects if d.name == name and d.score > min_score]
            confident = sorted(named, key=lambda d: -d.score)[: rules.max_objects]
            assert group[0] == confident[0] and set(group) <= set(confident)
            assert group == sorted(group, key=lambda d: -d.score)
            for index, detection in enumerate(group):
                others = [box_iou(detection.box, other.box) for other in group[:index]]
                assert rules.nms_threshold == 1 or all(iou < rules.nms_threshold for iou in others)
            for removed in set(confident) - set(group):
                stronger = [d for d in group if d.score >= removed.score]
                assert any(box_iou(removed.box, d.box) >= rules.nms_threshold for d in stronger), (
                    "removed without a reason"
                )


def test_published_relations_are_reproduced() -> None:
    for golden in GOLDEN["relations"]:
        a, b = tuple(golden["a"]), tuple(golden["b"])
        assert spatial_relations(a, b) == set(golden["rel"])
        assert box_iou(a, b) == pytest.approx(golden["iou"], abs=1e-5)


def test_colors_are_the_published_ones() -> None:
    assert list(COLORS) == GOLDEN["colors"]


def test_extra_copies_pass_the_published_rules_and_fail_the_strict_ones() -> None:
    corners: list[Box] = [(0, 0, 20, 20), (40, 0, 60, 20), (0, 40, 20, 60), (40, 40, 60, 60)]
    copies = [DetectedObject("book", box, 0.95) for box in corners]
    metadata = {"tag": "single_object", "include": [{"class": "book", "count": 1}], "prompt": "a book"}
    assert evaluate_detections(copies, metadata) == (True, [])
    correct, (reason,) = evaluate_detections(copies, metadata, GenEvalRules(strict=True))
    assert not correct and "expected 1" in reason and "found 4" in reason
    assert evaluate_detections(copies[:1], metadata, GenEvalRules(strict=True))[0]


def test_equal_centers_have_no_relation() -> None:
    assert spatial_relations((0, 0, 10, 10), (0, 0, 10, 10)) == set()


def test_ties_are_sorted_last_first_as_published() -> None:
    boxes: list[Box] = [(0, 0, 9, 9), (20, 0, 29, 9), (40, 0, 49, 9)]
    objects = [
        DetectedObject("cup", box, 0.5, color) for box, color in zip(boxes, ("red", "blue", "green"), strict=True)
    ]
    assert [d.color for d in filter_detections(objects, "colors")["cup"]] == ["green", "blue", "red"]
    metadata = {"tag": "colors", "include": [{"class": "cup", "count": 1, "color": "green"}], "prompt": "a green cup"}
    assert evaluate_detections(objects, metadata) == (True, [])


def test_score_equal_to_the_threshold_in_float32_is_dropped() -> None:
    for score in (float(np.float32(0.3)), 0.3):
        assert filter_detections([DetectedObject("cup", (0, 0, 9, 9), score)], "colors") == {}
    assert filter_detections([DetectedObject("cup", (0, 0, 9, 9), 0.30001)], "colors")
