"""The progress display on a terminal and in a log file."""

from __future__ import annotations

import re
from io import StringIO
from itertools import count
from pathlib import Path

import pytest
import torch
from rich.console import Console

from tastemaker.config.load import load_any_config
from tastemaker.training.events import (
    CheckpointSaved,
    Event,
    GuardChecked,
    SamplesGenerated,
    StepCompleted,
    TrainingFinished,
    TrainingStarted,
)
from tastemaker.training.loggers.progress import ProgressLogger, Throughput
from tastemaker.training.trainer import build_loggers


def update(step: int, seconds: float = 2.0, samples: int = 8) -> StepCompleted:
    metrics = {
        "loss": -0.0123,
        "grad_norm": 0.53,
        "lr": 1e-5,
        "reward/mean": 0.6 + step / 100,
        "kl": 0.002,
        "rewards/a": 1.0,
        "rewards/b": 0.2,
    }
    return StepCompleted(step, metrics, seconds, samples)


def make_events(steps: int, first: int = 0) -> list[Event]:
    updates = [update(step) for step in range(first + 1, steps + 1)]
    saved = CheckpointSaved(steps, Path("runs/demo/checkpoints/last"))
    return [
        TrainingStarted(first, steps, Path("runs/demo"), 12345),
        *updates,
        saved,
        TrainingFinished(steps, f"all {steps} steps done"),
    ]


class Clock:
    """A clock that advances by a second at each call."""

    def __init__(self) -> None:
        self._ticks = count()

    def __call__(self) -> float:
        return float(next(self._ticks))


def display(events: list[Event], terminal: bool) -> str:
    out = StringIO()
    console = Console(file=out, width=80, force_terminal=terminal, color_system=None, legacy_windows=False)
    progress = ProgressLogger(console, Clock())
    for event in events:
        progress.log(event)
    progress.close()
    return out.getvalue()


def test_log_file_gets_plain_lines_and_the_last_step() -> None:
    lines = display(make_events(40), terminal=False).splitlines()
    assert re.fullmatch(r"runs/demo: 40 steps\b.*\b12,345\b.*", lines[0])
    assert lines[1].startswith(
        "step 1/40  reward 0.61  loss -0.0123  KL 0.002  grad norm 0.53  lr 1e-05  4 images/s  0:"
    )
    assert lines[1].endswith(" left")
    assert lines[-2].startswith("step 40/40  reward 1 ")
    assert 4 < len(lines) < 30
    assert "\x1b" not in "".join(lines)


def test_summary_has_reward_and_checkpoint() -> None:
    last = display(make_events(40), terminal=False).splitlines()[-1]
    assert last.startswith("all 40 steps done (reward 0.61 -> 1, took 0:")
    assert last.endswith(", saved in runs/demo/checkpoints/last)")


def test_terminal_shows_bar_metrics_and_rewards() -> None:
    out = StringIO()
    progress = ProgressLogger(Console(file=StringIO(), width=80, force_terminal=True), Clock())
    for event in make_events(40)[:21]:
        progress.log(event)
    Console(file=out, width=80, color_system=None).print(progress._render())
    progress.close()
    bar, numbers, parts = out.getvalue().splitlines()
    assert max(len(line) for line in (bar, numbers, parts)) <= 80
    assert "20/40 4 images/s 0:" in bar
    assert numbers.startswith("reward 0.8  loss -0.0123  KL 0.002  grad norm 0.53  lr 1e-05")
    assert parts.split() == ["a", "1", "b", "0.2"]


def test_complete_run_on_a_terminal() -> None:
    assert "reward 0.61 -> 0.7" in display(make_events(10), terminal=True)


def test_resumed_run_shows_its_first_step() -> None:
    lines = display(make_events(40, first=30), terminal=False).splitlines()
    assert re.fullmatch(r"runs/demo: 40 steps\b.*\bstep 30\b.*", lines[0])
    assert lines[1].startswith("step 31/40")


def test_videos_are_called_videos() -> None:
    sampled = SamplesGenerated(0, ("a",), torch.zeros(1, 4, 3, 8, 8), {})
    assert "4 videos/s" in display([*make_events(2)[:1], sampled, update(1), update(2)], terminal=False)


@pytest.mark.parametrize(("recipe", "noun"), [("grpo-toy-video", "videos"), ("grpo-toy-flow", "images")])
def test_throughput_unit_is_known_before_the_first_samples(recipe: str, noun: str, tmp_path: Path) -> None:
    out = StringIO()
    loggers = build_loggers(load_any_config(recipe), Console(file=out, width=80))
    for event in [TrainingStarted(0, 2, tmp_path, 1), update(1)]:
        loggers.log(event)
    loggers.close()
    assert f"4 {noun}/s" in " ".join(out.getvalue().split())


def test_summary_without_rewards_has_the_loss() -> None:
    events = [
        TrainingStarted(0, 2, Path("r"), 1),
        *(StepCompleted(k, {"loss": 1.0 / k}, 1.0, 1) for k in (1, 2)),
        TrainingFinished(2, "stopped"),
    ]
    assert "stopped (loss 1 -> 0.5, took 0:" in display(list(events), terminal=False)


def test_rewards_of_srpo_are_shown() -> None:
    metrics = {"relative_reward/denoise": -0.25, "relative_reward/inversion": 0.75, "loss/policy": 0.5}
    events: list[Event] = [TrainingStarted(0, 2, Path("r"), 1), GuardChecked(0, {"reward/mean": 0.61}, None)]
    events += [StepCompleted(1, metrics, 1.0, 1), GuardChecked(2, {"reward/mean": 0.72}, None)]
    events += [StepCompleted(2, metrics, 1.0, 1), TrainingFinished(2, "done")]
    _, first, last, summary = display(events, terminal=False).splitlines()
    assert first.startswith("step 1/2  reward 0.61  relative reward 0.25  loss 0.5")
    assert last.startswith("step 2/2  reward 0.72  ") and "done (reward 0.61 -> 0.72, " in summary


def test_summary_without_any_step() -> None:
    text = display(
        [TrainingStarted(0, 5, Path("[bold]odd[/bold]"), 1), TrainingFinished(0, "interrupted")], terminal=False
    )
    assert "[bold]odd[/bold]" in text
    assert "interrupted (took 0:" in text


def test_throughput_follows_recent_steps() -> None:
    throughput = Throughput()
    for _ in range(50):
        throughput.add(update(1, seconds=4.0))
    assert throughput.samples_per_second == pytest.approx(2.0)
    for _ in range(50):
        throughput.add(update(1, seconds=1.0))
    assert throughput.samples_per_second == pytest.approx(8.0, rel=0.05)


@pytest.mark.parametrize("terminal", [True, False])
def test_guard_warning_is_printed_once(terminal: bool) -> None:
    checks = [GuardChecked(step, {}, "probable reward hacking" if step > 1 else None) for step in range(1, 5)]
    output = display([*make_events(5)[:2], *checks, *make_events(5)[2:]], terminal)
    assert output.count("warning, step 2: probable reward hacking") == 1 and output.count("reward hacking") == 1
