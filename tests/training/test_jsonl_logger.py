"""metrics.jsonl is valid, complete and never repeats a step."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tastemaker.training.events import GuardChecked, StepCompleted, TrainingFinished, TrainingStarted
from tastemaker.training.loggers.jsonl import JsonlLogger


def log_run(directory: Path, first: int, last: int, loss: float = 0.5) -> None:
    logger = JsonlLogger()
    logger.log(TrainingStarted(first, 100, directory, 10))
    for step in range(first + 1, last + 1):
        logger.log(StepCompleted(step, {"loss/policy": loss, "reward/mean": step / 10}, 0.25, 16))
    logger.log(TrainingFinished(last, "finished"))
    logger.close()


def read_rows(directory: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]


def test_each_step_is_a_row(tmp_path: Path) -> None:
    log_run(tmp_path / "new", 0, 3)
    assert read_rows(tmp_path / "new")[1] == {
        "step": 2,
        "time/step": 0.25,
        "samples": 16,
        "samples_per_second": 64.0,
        "loss/policy": 0.5,
        "reward/mean": 0.2,
    }


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_non_finite_values_are_null(tmp_path: Path, value: float) -> None:
    log_run(tmp_path, 0, 1, value)
    assert read_rows(tmp_path)[0]["loss/policy"] is None
    assert "NaN" not in (tmp_path / "metrics.jsonl").read_text()


def test_resumed_run_drops_the_steps_after_its_checkpoint(tmp_path: Path) -> None:
    log_run(tmp_path, 0, 7, loss=1.0)
    log_run(tmp_path, 4, 9, loss=2.0)
    assert [row["step"] for row in read_rows(tmp_path)] == list(range(1, 10))
    assert [row["loss/policy"] for row in read_rows(tmp_path)] == [1.0] * 4 + [2.0] * 5


def test_new_run_starts_an_empty_file(tmp_path: Path) -> None:
    log_run(tmp_path, 0, 7)
    log_run(tmp_path, 0, 2)
    assert [row["step"] for row in read_rows(tmp_path)] == [1, 2]


@pytest.mark.parametrize(
    "line", ['{"step": 3, "lo', '{"step": 3, "loss/policy": 1.0}', '{"step": "x"}\n', "[3]\n", "\x00\x00\n", "3"]
)
def test_incomplete_row_is_dropped(tmp_path: Path, line: str) -> None:
    log_run(tmp_path, 0, 2)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write(line)
    log_run(tmp_path, 2, 4)
    assert [row["step"] for row in read_rows(tmp_path)] == [1, 2, 3, 4]


def test_rows_are_flushed_at_once(tmp_path: Path) -> None:
    logger = JsonlLogger()
    logger.log(TrainingStarted(0, 2, tmp_path, 1))
    logger.log(StepCompleted(1, {"loss/policy": 1.0}, 0.1, 1))
    assert len(read_rows(tmp_path)) == 1
    logger.close()


def test_each_guard_check_is_a_row(tmp_path: Path) -> None:
    for _ in range(2):
        logger = JsonlLogger()
        logger.log(TrainingStarted(0, 2, tmp_path, 1))
        logger.log(GuardChecked(0, {"reward/mean": 0.5, "diversity": float("nan")}, None))
        logger.log(GuardChecked(1, {"reward/mean": 0.75}, "too good"))
        logger.close()
    assert read_rows(tmp_path) == [
        {"step": 0, "guard/reward/mean": 0.5, "guard/diversity": None},
        {"step": 1, "guard/reward/mean": 0.75, "warning": "too good"},
    ]
