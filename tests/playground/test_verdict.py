"""Batched verdicts and scores of detections match GenEval's rules for single images."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tastemaker.core.randomness import Randomness
from tastemaker.evaluation.geneval_rules import PLAYEVAL, evaluate_detections
from tastemaker.evaluation.playeval import list_detections
from tastemaker.playground.captions import CLASSES, SceneCaptions, parse_captions, sample_captions
from tastemaker.playground.detector import CELL, CELLS, MEAN_LOG_SIZE, Detections, DetectorMaps, decode_detections
from tastemaker.playground.scenes import Scenes, corrupt_captions, sample_scenes, shows_caption
from tastemaker.playground.verdict import compute_verdict, partial_credit, soft_score


def make_rng(count: int, seed: int = 0) -> Randomness:
    return Randomness(seed, 0, torch.arange(count))


def perfect_maps(scenes: Scenes) -> DetectorMaps:
    """The maps of a detector that recognizes every object of the scenes."""
    count = len(scenes)
    heat, color = torch.full((count, len(CLASSES), CELLS, CELLS), -8.0), torch.zeros(count, 10, CELLS, CELLS)
    offset, size = torch.zeros(count, 2, CELLS, CELLS), torch.zeros(count, 2, CELLS, CELLS)
    for n, slot in scenes.present.nonzero().tolist():
        x, y = scenes.x[n, slot] / CELL, scenes.y[n, slot] / CELL
        column, row = int(x), int(y)
        heat[n, scenes.class_id[n, slot], row, column] = 4.0 + 0.1 * slot
        color[n, scenes.color[n, slot] - 1, row, column] = 5.0
        offset[n, :, row, column] = torch.stack([x - column, y - row]) - 0.5
        size[n, :, row, column] = scenes.extents()[n, slot].log() - MEAN_LOG_SIZE
    return DetectorMaps(heat, color, offset, size)


def random_detections(count: int, seed: int) -> Detections:
    """Random detections of two classes and two colors, so that every rule holds for some and fails for others."""
    rng = make_rng(count, seed)
    words, draws = rng.words("things", 32).view(count, 2, 16), rng.uniform("where", 5, 16)
    score, order = (draws[:, 0] * (draws[:, 0] > 0.8)).sort(1, descending=True)
    center, span = 64 * draws[:, 1:3].transpose(1, 2), 4 + 20 * draws[:, 3:].transpose(1, 2)
    kind, color = (words[:, 0] % 2).gather(1, order), 1 + (words[:, 1] % 2).gather(1, order)
    return Detections(kind, color, score, center, span)


def two_class_captions(count: int, seed: int) -> SceneCaptions:
    """Captions with the two classes and colors of `random_detections`."""
    captions = sample_captions(make_rng(count, seed))
    paired = captions.has_two_objects()
    return replace(
        captions,
        first=torch.zeros_like(captions.first),
        second=paired.long(),
        first_color=captions.first_color.clamp(max=1),
        second_color=2 * captions.second_color.clamp(max=1),
    )


@pytest.mark.parametrize("strict", [True, False])
def test_verdict_matches_geneval_rules(strict: bool) -> None:
    detections, captions = random_detections(1000, 1), two_class_captions(1000, 1)
    batched = compute_verdict(detections, captions, strict).bool().tolist()
    rules = replace(PLAYEVAL, strict=strict)
    single = [
        evaluate_detections(d, entry, rules)[0]
        for d, entry in zip(list_detections(detections), captions.metadata(), strict=True)
    ]
    assert batched == single
    for task in range(6):
        verdicts = compute_verdict(detections, captions, strict)[captions.task == task]
        assert 0 < verdicts.mean() < 1  # else the comparison is vacuous for this task


@pytest.mark.parametrize("strict", [True, False])
def test_verdict_of_perfect_detections_is_the_truth(strict: bool) -> None:
    captions = sample_captions(make_rng(400))
    scenes = sample_scenes(corrupt_captions(captions, 0.5, make_rng(400)), make_rng(400))
    colored = (captions.task == 3) | (captions.task == 5)
    unambiguous = ~(colored & (scenes.present & (scenes.color == 0)).any(1))
    agree = compute_verdict(decode_detections(perfect_maps(scenes)), captions, strict).bool() == shows_caption(
        scenes, captions, strict
    )
    assert agree[unambiguous].all()


def test_four_copies_fail_the_strict_verdict_only() -> None:
    requested, drawn = parse_captions(["a photo of a book"]), parse_captions(["a photo of four books"])
    detections = decode_detections(perfect_maps(sample_scenes(drawn, make_rng(1))))
    assert compute_verdict(detections, requested, strict=False).item() == 1
    assert compute_verdict(detections, requested, strict=True).item() == 0
    assert partial_credit(detections, requested, strict=True).item() == 0.5
    assert compute_verdict(detections, drawn, strict=True).item() == 1


def test_partial_credit_is_1_iff_the_verdict_is_yes() -> None:
    detections, captions = random_detections(3000, 2), two_class_captions(3000, 2)
    for strict in (True, False):
        yes, credit = compute_verdict(detections, captions, strict).bool(), partial_credit(detections, captions, strict)
        assert ((credit >= 0) & (credit <= 1)).all()
        assert torch.equal(credit == 1, yes)


def test_partial_credit_counts_correct_parts() -> None:
    detections = decode_detections(
        perfect_maps(sample_scenes(parse_captions(["a photo of a red cake and a green book"]), make_rng(1)))
    )
    requested = parse_captions(["a photo of a red cake and a blue book"])
    assert partial_credit(detections, requested).item() == pytest.approx(0.75)
    assert partial_credit(detections, parse_captions(["a photo of a red cake and a blue dog"])).item() == pytest.approx(
        0.5
    )


def test_soft_score_prefers_correct_scenes() -> None:
    captions = sample_captions(make_rng(300))
    wrong = corrupt_captions(captions, 1.0, make_rng(300))
    correct, corrupted = sample_scenes(captions, make_rng(300)), sample_scenes(wrong, make_rng(300))
    good, bad = soft_score(perfect_maps(correct), captions), soft_score(perfect_maps(corrupted), captions)
    incorrect = ~shows_caption(corrupted, captions, strict=True)
    assert (good[incorrect] > bad[incorrect]).float().mean() > 0.97  # the color of an undyed object is ambiguous
    assert (good <= 0).all()


def test_soft_score_penalizes_copies_only_if_strict() -> None:
    requested, drawn = parse_captions(["a photo of a book"]), parse_captions(["a photo of four books"])
    one, four = perfect_maps(sample_scenes(requested, make_rng(1))), perfect_maps(sample_scenes(drawn, make_rng(1)))
    assert soft_score(four, requested, strict=True).item() < soft_score(one, requested, strict=True).item() - 1
    assert soft_score(four, requested, strict=False).item() == pytest.approx(
        soft_score(one, requested, strict=False).item(), abs=0.02
    )


def test_soft_score_gradient_matches_finite_differences() -> None:
    captions = two_class_captions(24, 3)
    rng = make_rng(24, 3)
    maps: list[Tensor] = [
        rng.normal("heat", 48, CELLS, CELLS).double() - 2,
        rng.normal("color", 10, CELLS, CELLS).double(),
        torch.zeros(24, 2, CELLS, CELLS).double(),
        torch.zeros(24, 2, CELLS, CELLS).double(),
    ]
    for part in (0, 1):
        values = [m.clone().requires_grad_(index == part) for index, m in enumerate(maps)]
        soft_score(DetectorMaps(*values), captions).sum().backward()
        direction = rng.normal(f"direction {part}", *maps[part].shape[1:]).double()
        derivative = (values[part].grad * direction).sum()
        high, low = (
            soft_score(DetectorMaps(*maps[:part], maps[part] + step * direction, *maps[part + 1 :]), captions).sum()
            for step in (1e-6, -1e-6)
        )
        assert derivative.item() == pytest.approx(((high - low) / 2e-6).item(), rel=1e-4)
        assert abs(derivative.item()) > 1e-3
