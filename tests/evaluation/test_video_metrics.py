"""PlayEval-Motion: its prompts, its scores, and that the exact pixels of videos are scored."""

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
from tastemaker.evaluation.playeval import MOTION_LABELS, PlayEvalMotionScorer, load_playeval_motion_scorer
from tastemaker.playground import motion
from tastemaker.playground.captions import TASKS
from tastemaker.playground.motion import MOTIONS
from tastemaker.playground.network_files import TINY
from tastemaker.search.base import SearchCost


@pytest.fixture(scope="module")
def scorer() -> PlayEvalMotionScorer:
    return load_playeval_motion_scorer(TINY)


def test_playeval_motion_has_every_motion_equally_often_in_every_task() -> None:
    benchmark = playeval_motion(72)
    assert benchmark.prompts[:36] == playeval_motion(36).prompts
    assert set(Counter(zip(benchmark.tags, motion.parse_motion(benchmark.prompts).tolist(), strict=True)).values()) == {
        2
    }
    images = playeval(72).prompts
    assert all(text.startswith(f"{plain} ") for text, plain in zip(benchmark.prompts, images, strict=True))
    assert all(text == metadata["prompt"] for text, metadata in zip(benchmark.prompts, benchmark.metadata, strict=True))


def test_video_evaluation_reports_content_and_motion_by_task(scorer: PlayEvalMotionScorer, tmp_path: Path) -> None:
    benchmark, clips = playeval_motion(36, 2), []

    def paint(batch: PromptBatch, indices: Tensor) -> tuple[Tensor, SearchCost]:
        clips.append((scorer.real_samples(batch.prompts, batch.metadata, indices.tolist()) * 255).round() / 255)
        return clips[-1], SearchCost(0)

    list(evaluate(benchmark, paint, scorer, tmp_path))
    rows, report = read_jsonl(tmp_path / SCORES), json.loads((tmp_path / REPORT).read_text("utf-8"))
    torch.testing.assert_close(torch.stack([read_image(tmp_path / row["file"]) for row in rows]), torch.cat(clips))
    assert list(report["scores"]["strict"]) == [*TASKS, *MOTIONS, "overall"]
    assert list(report["scores"]) == ["strict", "lenient", "graded", "content", "motion"]
    assert report["frechet"] < 0.01 and report["diversity"] > 0  # equal to the real samples
    assert all(row["strict"] == row["content"] * row["motion"] for row in rows)
    assert all((row["strict"] == 1) == (not row["reasons"]) for row in rows)


def test_video_with_another_motion_is_wrong(scorer: PlayEvalMotionScorer) -> None:
    benchmark = playeval_motion(12, 1)
    videos = Randomness(0, 0, torch.arange(12)).uniform("pixels", 8, 3, 64, 64)
    rows = scorer.score(videos, benchmark.prompts, benchmark.metadata)
    predicted = [MOTION_LABELS.index(row["seen"]) for row in rows]
    requested = motion.parse_motion(benchmark.prompts).tolist()
    assert [row["motion"] == 1 for row in rows] == [a == b for a, b in zip(predicted, requested, strict=True)]
    wrong = [(row, MOTION_LABELS[label]) for row, label in zip(rows, requested, strict=True) if not row["motion"]]
    assert wrong and all(row["strict"] == 0 for row, _ in wrong)
    assert all(row["reasons"][-1] == f"expected {label}, found {row['seen']}" for row, label in wrong)


def test_evaluate_command_runs_a_video_model(tmp_path: Path) -> None:
    recipe = "reward-gradient-playground-video"
    arguments = ["evaluate", "playeval-motion", "--model", recipe, "--tiny", "--num-prompts", "6", "--device", "cpu"]
    with pytest.raises(SystemExit) as exit_info:
        main([*arguments, "--out", str(tmp_path)])
    assert exit_info.value.code == 0
    assert json.loads((tmp_path / REPORT).read_text("utf-8"))["images"] == 12
    assert read_image(next(tmp_path.glob("samples/*/*.png"))).shape == (8, 3, 64, 64)


def test_image_model_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_info:
        main(["evaluate", "playeval-motion", "--model", "grpo-toy-flow", "--tiny", "--out", str(tmp_path)])
    assert exit_info.value.code == 2
    assert "needs videos" in capsys.readouterr().err
