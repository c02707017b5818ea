"""metrics.jsonl is valid, complete and never repeats a step."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tastemaker.training.events import GuardChecked, StepCompleted, TrainingFinished, TrainingStarted
from tastemaker.training.loggers.jsonl import JsonlLogger


def run(directory: Path, first: int, last: int, loss: float = 0.5) -> None:
    observer = JsonlLogger()
    observer.see(TrainingStarted(first, 100, directory, 10))
    for step in range(first + 1, last + 1):
        observer.see(StepCompleted(step, {"loss": loss, "reward": step / 10}, 0.25, 16))
    observer.see(TrainingFinished(last, "finished"))
    observer.close()


def rows(directory: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]


def test_every_step_is_a_row(tmp_path: Path) -> None:
    run(tmp_path / "new", 0, 3)
    assert rows(tmp_path / "new")[1] == {"step": 2, "seconds": 0.25, "samples": 16, "loss": 0.5, "reward": 0.2}


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_is_null(tmp_path: Path, bad: float) -> None:
    run(tmp_path, 0, 1, bad)
    assert rows(tmp_path)[0]["loss"] is None
    assert "NaN" not in (tmp_path / "metrics.jsonl").read_text()


def test_a_resumed_run_takes_back_the_steps_after_its_checkpoint(tmp_path: Path) -> None:
    run(tmp_path, 0, 7, loss=1.0)
    run(tmp_path, 4, 9, loss=2.0)
    assert [row["step"] for row in rows(tmp_path)] == list(range(1, 10))
    assert [row["loss"] for row in rows(tmp_path)] == [1.0] * 4 + [2.0] * 5


def test_a_run_begun_anew_starts_an_empty_file(tmp_path: Path) -> None:
    run(tmp_path, 0, 7)
    run(tmp_path, 0, 2)
    assert [row["step"] for row in rows(tmp_path)] == [1, 2]


@pytest.mark.parametrize(
    "torn", ['{"step": 3, "lo', '{"step": 3, "loss": 1.0}', '{"step": "x"}\n', "[3]\n", "\x00\x00\n", "3"]
)
def test_a_row_that_a_kill_left_torn_is_dropped(tmp_path: Path, torn: str) -> None:
    run(tmp_path, 0, 2)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write(torn)
    run(tmp_path, 2, 4)
    assert [row["step"] for row in rows(tmp_path)] == [1, 2, 3, 4]


def test_rows_are_on_disk_at_once(tmp_path: Path) -> None:
    observer = JsonlLogger()
    observer.see(TrainingStarted(0, 2, tmp_path, 1))
    observer.see(StepCompleted(1, {"loss": 1.0}, 0.1, 1))
    assert len(rows(tmp_path)) == 1
    observer.close()


def test_what_the_guard_saw_is_a_row_of_its_own_and_a_new_run_looks_anew(tmp_path: Path) -> None:
    for _ in range(2):
        observer = JsonlLogger()
        observer.see(TrainingStarted(0, 2, tmp_path, 1))
        observer.see(GuardChecked(0, {"reward": 0.5, "diversity": float("nan")}, None))
        observer.see(GuardChecked(1, {"reward": 0.75}, "too good"))
        observer.close()
    assert rows(tmp_path) == [
        {"step": 0, "guard/reward": 0.5, "guard/diversity": None},
        {"step": 1, "guard/reward": 0.75, "warning": "too good"},
    ]
