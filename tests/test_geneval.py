"""The rules against verdicts of the published evaluation."""

from __future__ import annotations

import json
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

GOLDEN: dict[str, Any] = json.loads((Path(__file__).parent / "fixtures/showo/geneval.json").read_text("utf-8"))


def detections(case: dict[str, Any]) -> list[DetectedObject]:
    found = []
    for name, numbers, color in case["detections"]:
        left, top, right, bottom, score = np.float32(numbers).tolist()  # the published evaluation holds boxes so
        found.append(DetectedObject(name, (left, top, right, bottom), score, color))
    return found


def lines(reason: str) -> list[Any]:
    """Reasons in order, words of each without order: the relations that were found come as a set."""
    return [sorted(line.split()) for line in reason.splitlines()]


def reproduced(case: dict[str, Any], golden: dict[str, Any], rules: GenEvalRules) -> None:
    found, metadata = detections(case), case["metadata"]
    kept = {
        name: [[*d.box, d.score] for d in group]
        for name, group in filter_detections(found, metadata["tag"], rules).items()
    }
    assert kept == golden["kept"]
    correct, reasons = evaluate_detections(found, metadata, rules)
    assert correct == golden["correct"]
    assert lines("\n".join(reasons)) == lines(golden["reason"])


def test_every_published_verdict_is_reproduced() -> None:
    for case in GOLDEN["cases"]:
        reproduced(case, case, GenEvalRules())


def picture(golden: dict[str, Any]) -> dict[str, Any] | None:
    """The case a verdict under other settings is of: numbers count cases of a longer list, so boxes must tell."""
    wanted = {tuple(box) for group in golden["kept"].values() for box in group}
    for case in GOLDEN["cases"]:
        if wanted and wanted <= {(*d.box, d.score) for d in detections(case)}:
            found: dict[str, Any] = case
            return found
    return None


def test_every_published_verdict_under_other_settings_is_reproduced() -> None:
    known = [(golden, case) for golden in GOLDEN["option_variants"] if (case := picture(golden))]
    assert len(known) == 10  # the other pictures were not kept
    for golden, case in known:
        overlap, threshold, offset, most = golden["opts"]
        reproduced(
            case,
            golden,
            GenEvalRules(threshold=threshold, nms_threshold=overlap, position_threshold=offset, max_objects=most),
        )


def test_what_was_kept_under_other_settings_is_kept_again() -> None:
    for golden in GOLDEN["option_variants"]:
        overlap, threshold, offset, most = golden["opts"]
        rules = GenEvalRules(threshold=threshold, nms_threshold=overlap, position_threshold=offset, max_objects=most)
        found = [DetectedObject(name, tuple(b[:4]), b[4]) for name, group in golden["kept"].items() for b in group]
        kept = {name: [[*d.box, d.score] for d in group] for name, group in filter_detections(found, "", rules).items()}
        assert kept == golden["kept"]


@pytest.mark.parametrize("options", sorted({tuple(golden["opts"]) for golden in GOLDEN["option_variants"]}))
def test_other_settings_keep_what_they_say_of_every_recorded_picture(options: tuple[float, float, float, int]) -> None:
    overlap, threshold, offset, most = options
    rules = GenEvalRules(threshold=threshold, nms_threshold=overlap, position_threshold=offset, max_objects=most)
    for case in GOLDEN["cases"]:
        found, tag = detections(case), case["metadata"]["tag"]
        least = 0.9 if tag == "counting" else threshold
        for name, group in filter_detections(found, tag, rules).items():
            sure = sorted((d for d in found if d.name == name and d.score > least), key=lambda d: -d.score)[:most]
            assert group[0] == sure[0] and set(group) <= set(sure) and group == sorted(group, key=lambda d: -d.score)
            for place, one in enumerate(group):
                others = [box_iou(one.box, other.box) for other in group[:place]]
                assert overlap == 1 or all(shared < overlap for shared in others)
            for lost in set(sure) - set(group):
                surer = [d for d in group if d.score >= lost.score]
                assert any(box_iou(lost.box, d.box) >= overlap for d in surer), "lost without a reason"


def test_every_published_relation_is_reproduced() -> None:
    for golden in GOLDEN["relations"]:
        a, b = tuple(golden["a"]), tuple(golden["b"])
        assert spatial_relations(a, b) == set(golden["rel"])
        assert box_iou(a, b) == pytest.approx(golden["iou"], abs=1e-5)


def test_the_colours_are_the_published_ones() -> None:
    assert list(COLORS) == GOLDEN["colors"]


def test_four_copies_pass_the_published_rule_and_fail_the_strict_one() -> None:
    corners: list[Box] = [(0, 0, 20, 20), (40, 0, 60, 20), (0, 40, 20, 60), (40, 40, 60, 60)]
    copies = [DetectedObject("book", box, 0.95) for box in corners]
    metadata = {"tag": "single_object", "include": [{"class": "book", "count": 1}], "prompt": "a book"}
    assert evaluate_detections(copies, metadata) == (True, [])
    assert evaluate_detections(copies, metadata, GenEvalRules(strict=True)) == (
        False,
        ["expected 1 objects in all, found 4"],
    )
    assert evaluate_detections(copies[:1], metadata, GenEvalRules(strict=True))[0]


def test_centres_on_top_of_each_other_stand_in_no_relation() -> None:
    assert spatial_relations((0, 0, 10, 10), (0, 0, 10, 10)) == set()


def test_of_equally_sure_objects_the_last_found_comes_first_as_published() -> None:
    boxes: list[Box] = [(0, 0, 9, 9), (20, 0, 29, 9), (40, 0, 49, 9)]
    alike = [DetectedObject("cup", box, 0.5, color) for box, color in zip(boxes, ("red", "blue", "green"), strict=True)]
    assert [d.color for d in filter_detections(alike, "colors")["cup"]] == ["green", "blue", "red"]
    asked = {"tag": "colors", "include": [{"class": "cup", "count": 1, "color": "green"}], "prompt": "a green cup"}
    assert evaluate_detections(alike, asked) == (True, [])


def test_a_score_at_the_threshold_is_not_above_it_in_the_precision_of_detectors() -> None:
    for score in (float(np.float32(0.3)), 0.3):
        assert filter_detections([DetectedObject("cup", (0, 0, 9, 9), score)], "colors") == {}
    assert filter_detections([DetectedObject("cup", (0, 0, 9, 9), 0.30001)], "colors")
