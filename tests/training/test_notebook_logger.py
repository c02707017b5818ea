"""The progress display of notebooks, with a stub of IPython.display."""

from __future__ import annotations

import sys
from itertools import count
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from rich.console import Console

import tastemaker as tm
from tastemaker.console import in_notebook
from tastemaker.report.figure import Figure
from tastemaker.training import trainer
from tastemaker.training.events import (
    CheckpointSaved,
    GuardChecked,
    SamplesGenerated,
    StepCompleted,
    TrainingFinished,
    TrainingStarted,
)
from tastemaker.training.loggers.notebook import NotebookProgressLogger
from tastemaker.training.loggers.progress import ProgressLogger


class Display:
    """A cell's output: what is displayed in each place, and everything that was there before."""

    def __init__(self) -> None:
        self.places: list[list[Any]] = []

    def display(self, content: Any, display_id: bool) -> Handle:
        assert display_id
        self.places.append([content])
        return Handle(self.places[-1])


class Handle:
    def __init__(self, history: list[Any]) -> None:
        self.history = history

    def update(self, content: Any) -> None:
        self.history.append(content)


@pytest.fixture
def output(monkeypatch: pytest.MonkeyPatch) -> Display:
    """A stub of IPython.display that keeps what it is given; HTML is its text."""
    output, module = Display(), ModuleType("IPython.display")
    module.__dict__.update(display=output.display, HTML=str)
    monkeypatch.setitem(sys.modules, "IPython", ModuleType("IPython"))
    monkeypatch.setitem(sys.modules, "IPython.display", module)
    return output


def sampled(step: int) -> SamplesGenerated:
    return SamplesGenerated(step, ("a <red>", "a blue"), torch.full((2, 1, 3, 8, 8), step / 10), {"color": step / 10})


def update(step: int) -> StepCompleted:
    return StepCompleted(step, {"reward/mean": step / 10, "loss/policy": 0.5}, 2.0, 8)


def test_bar_and_samples_are_updated_in_place(output: Display) -> None:
    clock = count().__next__  # a second per call
    logger = NotebookProgressLogger(Console(quiet=True), lambda: float(clock()))
    logger.log(TrainingStarted(0, 4, Path("runs/a<b"), 10, ("no reward is held out",)))
    logger.log(sampled(0))
    for step in range(1, 5):
        logger.log(update(step))
    logger.log(sampled(4))
    bar, samples = output.places  # two displays, however many events there are
    assert 'value="0" max="4"' in bar[0] and "a&lt;b" in bar[0] and "no reward is held out" in bar[0]
    assert 'value="2" max="4"' in bar[2] and "left" in bar[2] and "4 images/s" in bar[2] and "reward 0.2" in bar[2]
    assert 'value="4" max="4"' in bar[-1]
    assert [type(figure) for figure in samples] == [Figure, Figure]
    assert samples[1].title == "step 4: color 0.40" and not torch.equal(samples[0].frames, samples[1].frames)


def test_warning_and_end_stay_below_the_bar(output: Display) -> None:
    logger = NotebookProgressLogger(Console(quiet=True))
    logger.log(TrainingStarted(0, 2, Path("runs/a"), 10))
    logger.log(update(1))
    logger.log(GuardChecked(1, {}, "probable reward hacking"))
    logger.log(update(2))
    logger.log(CheckpointSaved(2, Path("runs/a/checkpoints/step-000002")))
    logger.log(TrainingFinished(2, "all 2 steps done"))
    logger.close()
    ((*_, last),) = output.places
    assert "probable reward hacking" in last and "all 2 steps done (reward 0.1 -&gt; 0.2" in last


def test_frequent_steps_update_the_bar_rarely(output: Display) -> None:
    ticks = count()
    logger = NotebookProgressLogger(Console(quiet=True), lambda: next(ticks) / 100)
    logger.log(TrainingStarted(0, 1000, Path("runs/a"), 10))
    for step in range(1, 201):
        logger.log(update(step))
    (bar,) = output.places
    assert 2 < len(bar) < 30


def test_resumed_run_starts_the_bar_at_its_step(output: Display) -> None:
    logger = NotebookProgressLogger(Console(quiet=True))
    logger.log(TrainingStarted(3, 4, Path("runs/a"), 10))
    assert 'value="3" max="4"' in output.places[0][0]


def test_terminal_progress_is_used_outside_of_notebooks() -> None:
    assert not in_notebook()
    config = tm.load("grpo-toy-flow")
    loggers = trainer.build_loggers(config, Console(quiet=True))
    kinds = [type(each) for each in vars(loggers)["_loggers"]]
    assert ProgressLogger in kinds and NotebookProgressLogger not in kinds


def test_train_shows_progress_in_a_notebook(
    output: Display, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for module in ("tastemaker.console", "tastemaker.training.trainer"):
        monkeypatch.setattr(f"{module}.in_notebook", lambda: True)
    quick = ["steps=2", "sample.every=1", "guard.every=0", "batch.prompts=4", f"output_dir={tmp_path}"]
    tm.train(tm.load("grpo-toy-flow", [*quick, "name=a"]))
    bar, samples = output.places
    assert "all 2 steps done" in bar[-1] and len(samples) == 3
    printed = capsys.readouterr()
    assert "the report is" in printed.out and not printed.err  # and nothing in red below the cell
    tm.train(tm.load("grpo-toy-flow", [*quick, "name=b"]), console=Console(quiet=True))
    assert len(output.places) == 2  # a quiet console silences the display too
