"""The verdict on all pictures at once against the rules on one at a time."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tastemaker.core.randomness import Randomness
from tastemaker.evaluation.geneval_rules import PLAYEVAL
from tastemaker.evaluation.geneval_rules import evaluate_detections as by_the_rules
from tastemaker.evaluation.playeval import list_detections
from tastemaker.playground.captions import CLASSES, SceneCaptions, parse_captions, sample_captions
from tastemaker.playground.detector import CELL, CELLS, MEAN_LOG_SIZE, Detections, DetectorMaps, decode_detections
from tastemaker.playground.scenes import Scenes, corrupt_captions, sample_scenes, shows_caption
from tastemaker.playground.verdict import compute_verdict, partial_credit, soft_score


def rows(count: int, seed: int = 0) -> Randomness:
    return Randomness(seed, 0, torch.arange(count))


def perfect(scenes: Scenes) -> DetectorMaps:
    """The maps of a detector that knows the scenes."""
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


def scattered(count: int, seed: int) -> Detections:
    """Detections of few classes and colours anywhere, so that every rule holds for some and fails for others."""
    rng = rows(count, seed)
    words, draws = rng.words("things", 32).view(count, 2, 16), rng.uniform("where", 5, 16)
    score, order = (draws[:, 0] * (draws[:, 0] > 0.8)).sort(1, descending=True)
    centre, span = 64 * draws[:, 1:3].transpose(1, 2), 4 + 20 * draws[:, 3:].transpose(1, 2)
    kind, color = (words[:, 0] % 2).gather(1, order), 1 + (words[:, 1] % 2).gather(1, order)
    return Detections(kind, color, score, centre, span)


def few(count: int, seed: int) -> SceneCaptions:
    """Captions of the two classes and colours that `scattered` has."""
    captions = sample_captions(rows(count, seed))
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
    found, captions = scattered(1000, 1), few(1000, 1)
    all_at_once = compute_verdict(found, captions, strict).bool().tolist()
    rules = replace(PLAYEVAL, strict=strict)
    one_by_one = [
        by_the_rules(d, fact, rules)[0] for d, fact in zip(list_detections(found), captions.metadata(), strict=True)
    ]
    assert all_at_once == one_by_one
    for task in range(6):
        verdicts = compute_verdict(found, captions, strict)[captions.task == task]
        assert 0 < verdicts.mean() < 1  # else the comparison says nothing of this task


@pytest.mark.parametrize("strict", [True, False])
def test_verdict_of_perfect_detections_is_the_truth(strict: bool) -> None:
    captions = sample_captions(rows(400))
    scenes = sample_scenes(corrupt_captions(captions, 0.5, rows(400)), rows(400))
    colored = (captions.task == 3) | (captions.task == 5)
    settled = ~(colored & (scenes.present & (scenes.color == 0)).any(1))
    agree = compute_verdict(decode_detections(perfect(scenes)), captions, strict).bool() == shows_caption(
        scenes, captions, strict
    )
    assert agree[settled].all()


def test_four_copies_fail_the_strict_verdict_only() -> None:
    asked, drawn = parse_captions(["a photo of a book"]), parse_captions(["a photo of four books"])
    found = decode_detections(perfect(sample_scenes(drawn, rows(1))))
    assert compute_verdict(found, asked, strict=False).item() == 1
    assert compute_verdict(found, asked, strict=True).item() == 0
    assert partial_credit(found, asked, strict=True).item() == 0.5
    assert compute_verdict(found, drawn, strict=True).item() == 1


def test_partial_credit_is_1_iff_the_verdict_is_yes() -> None:
    found, captions = scattered(3000, 2), few(3000, 2)
    for strict in (True, False):
        yes, credit = compute_verdict(found, captions, strict).bool(), partial_credit(found, captions, strict)
        assert ((credit >= 0) & (credit <= 1)).all()
        assert torch.equal(credit == 1, yes)


def test_partial_credit_counts_correct_parts() -> None:
    shown = decode_detections(
        perfect(sample_scenes(parse_captions(["a photo of a red cake and a green book"]), rows(1)))
    )
    asked = parse_captions(["a photo of a red cake and a blue book"])
    assert partial_credit(shown, asked).item() == pytest.approx(0.75)
    assert partial_credit(shown, parse_captions(["a photo of a red cake and a blue dog"])).item() == pytest.approx(0.5)


def test_soft_score_prefers_correct_scenes() -> None:
    captions = sample_captions(rows(300))
    wrong = corrupt_captions(captions, 1.0, rows(300))
    right, spoiled = sample_scenes(captions, rows(300)), sample_scenes(wrong, rows(300))
    good, bad = soft_score(perfect(right), captions), soft_score(perfect(spoiled), captions)
    false = ~shows_caption(spoiled, captions, strict=True)
    assert (good[false] > bad[false]).float().mean() > 0.97  # an undyed thing's colour is a guess
    assert (good <= 0).all()


def test_soft_score_penalizes_copies_only_if_strict() -> None:
    asked, drawn = parse_captions(["a photo of a book"]), parse_captions(["a photo of four books"])
    one, four = perfect(sample_scenes(asked, rows(1))), perfect(sample_scenes(drawn, rows(1)))
    assert soft_score(four, asked, strict=True).item() < soft_score(one, asked, strict=True).item() - 1
    assert soft_score(four, asked, strict=False).item() == pytest.approx(
        soft_score(one, asked, strict=False).item(), abs=0.02
    )


def test_soft_score_gradient_matches_finite_differences() -> None:
    captions = few(24, 3)
    rng = rows(24, 3)
    maps: list[Tensor] = [
        rng.normal("heat", 48, CELLS, CELLS).double() - 2,
        rng.normal("color", 10, CELLS, CELLS).double(),
        torch.zeros(24, 2, CELLS, CELLS).double(),
        torch.zeros(24, 2, CELLS, CELLS).double(),
    ]
    for part in (0, 1):
        values = [m.clone().requires_grad_(place == part) for place, m in enumerate(maps)]
        soft_score(DetectorMaps(*values), captions).sum().backward()
        direction = rng.normal(f"direction {part}", *maps[part].shape[1:]).double()
        slope = (values[part].grad * direction).sum()
        high, low = (
            soft_score(DetectorMaps(*maps[:part], maps[part] + step * direction, *maps[part + 1 :]), captions).sum()
            for step in (1e-6, -1e-6)
        )
        assert slope.item() == pytest.approx(((high - low) / 2e-6).item(), rel=1e-4)
        assert abs(slope.item()) > 1e-3
