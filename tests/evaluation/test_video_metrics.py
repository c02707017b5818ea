"""PlayEval of clips: what is asked, what is right, and that the very pixels are marked."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tastemaker.cli import main
from tastemaker.core.randomness import Randomness
from tastemaker.core.types import PromptBatch
from tastemaker.data.image_io import read_image
from tastemaker.evaluation.benchmarks import playeval, playeval_motion
from tastemaker.evaluation.evaluate import REPORT, SCORES, evaluate, read_jsonl
from tastemaker.evaluation.video_metrics import MOTION_LABELS, PlayEvalMotionScorer, load_playeval_motion_scorer
from tastemaker.playground import motion
from tastemaker.playground.captions import TASKS
from tastemaker.playground.motion import MOTIONS
from tastemaker.playground.network_files import TINY


@pytest.fixture(scope="module")
def marker() -> PlayEvalMotionScorer:
    return load_playeval_motion_scorer(TINY)


def test_every_task_is_asked_with_every_motion_alike() -> None:
    questions = playeval_motion(72)
    assert questions.prompts[:36] == playeval_motion(36).prompts
    assert set(Counter(zip(questions.tags, motion.parse_motion(questions.prompts).tolist(), strict=True)).values()) == {
        2
    }
    still = playeval(72).prompts
    assert all(text.startswith(f"{plain} ") for text, plain in zip(questions.prompts, still, strict=True))
    assert all(text == fact["prompt"] for text, fact in zip(questions.prompts, questions.facts, strict=True))


def test_an_evaluation_of_clips_reports_content_and_motion_task_by_task(
    marker: PlayEvalMotionScorer, tmp_path: Path
) -> None:
    questions, made = playeval_motion(36, 2), []

    def paint(batch: PromptBatch, rows: Tensor) -> tuple[Tensor, int]:
        made.append((marker.real(batch.prompts, batch.facts, rows.tolist()) * 255).round() / 255)
        return made[-1], 0

    list(evaluate(questions, paint, marker, tmp_path))
    rows, told = read_jsonl(tmp_path / SCORES), json.loads((tmp_path / REPORT).read_text("utf-8"))
    torch.testing.assert_close(torch.stack([read_image(tmp_path / row["file"]) for row in rows]), torch.cat(made))
    assert list(told["scores"]["strict"]) == [*TASKS, *MOTIONS, "overall"]
    assert list(told["scores"]) == ["strict", "lenient", "graded", "content", "motion"]
    assert told["frechet"] < 0.01 and told["diversity"] > 0  # the real ones are the same
    assert all(row["strict"] == row["content"] * row["motion"] for row in rows)
    assert all((row["strict"] == 1) == (not row["reasons"]) for row in rows)


def test_a_clip_that_moves_otherwise_is_wrong_whatever_it_shows(marker: PlayEvalMotionScorer) -> None:
    questions = playeval_motion(12, 1)
    clips = Randomness(0, 0, torch.arange(12)).uniform("pixels", 8, 3, 64, 64)
    marks = marker.mark(clips, questions.prompts, questions.facts)
    seen = [MOTION_LABELS.index(mark["seen"]) for mark in marks]
    wanted = motion.parse_motion(questions.prompts).tolist()
    assert [mark["motion"] == 1 for mark in marks] == [a == b for a, b in zip(seen, wanted, strict=True)]
    wrong = [(mark, MOTION_LABELS[place]) for mark, place in zip(marks, wanted, strict=True) if not mark["motion"]]
    assert wrong and all(mark["strict"] == 0 for mark, _ in wrong)
    assert all(mark["reasons"][-1] == f"expected {said}, found {mark['seen']}" for mark, said in wrong)


def test_the_command_evaluates_a_maker_of_clips(tmp_path: Path) -> None:
    recipe = "reward-gradient-playground-video"
    asked = ["evaluate", "playeval-motion", "--model", recipe, "--tiny", "--prompts", "6", "--device", "cpu"]
    with pytest.raises(SystemExit) as left:
        main([*asked, "--out", str(tmp_path)])
    assert left.value.code == 0
    assert json.loads((tmp_path / REPORT).read_text("utf-8"))["pictures"] == 12
    assert read_image(next(tmp_path.glob("samples/*/*.png"))).shape == (8, 3, 64, 64)


def test_a_maker_of_stills_is_refused_in_a_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(["evaluate", "playeval-motion", "--model", "grpo-toy-flow", "--tiny", "--out", str(tmp_path)])
    assert left.value.code == 2
    assert "asks for clips, but the model makes stills" in capsys.readouterr().err
