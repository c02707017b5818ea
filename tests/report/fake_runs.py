"""Runs that never were, with everything a run leaves behind."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from tastemaker.training.events import (
    Event,
    GuardChecked,
    SamplesGenerated,
    StepCompleted,
    TrainingFinished,
    TrainingStarted,
)
from tastemaker.training.loggers import sample_grids
from tastemaker.training.loggers.jsonl import JsonlLogger
from tastemaker.training.loggers.sample_grids import SampleGridLogger

PROMPTS = ("a red car", 'a <b>bold</b> & "quoted" prompt', "", "a very long prompt that goes on " * 8)
CONFIG = """\
objective: {type: grpo, group: 8}
model: {type: toy_flow}
rewards:
  bright: {type: brightness, weight: 1.0}
  color: {type: color, weight: 0}
name: %s
"""


def events(directory: Path, held: float, *, steps: int = 60, frames: int = 1, guard: bool = True) -> list[Event]:
    """A reward that rises while a held-out one changes by so much."""
    chance, told = random.Random(0), [TrainingStarted(0, steps, directory, 7)]
    noise = torch.Generator().manual_seed(0)
    for step in range(steps + 1):
        t = step / steps
        values = {
            "reward": 0.2 + 0.6 * t + chance.gauss(0, 0.01),
            "reward/color": 0.5 + held * t + chance.gauss(0, 0.01),
        }
        if step:
            rest = {"reward/bright": values["reward"], "kl": t, "grad_norm": 0.1, "loss": 0.0, "flat_groups": 0.1}
            told.append(StepCompleted(step, {**values, **rest}, 0.5, 64))
        if step % 20 == 0:
            pixels = torch.rand(len(PROMPTS), frames, 3, 16, 16, generator=noise)
            told.append(SamplesGenerated(step, PROMPTS, pixels, {"bright": values["reward"]}))
        if guard and step % 20 == 0:
            warning = (
                f"probable reward hacking: fell from 0.5 to {0.5 + held * t:.2g}" if held < 0 and step > 20 else None
            )
            told.append(GuardChecked(step, {**values, "diversity": 0.4, "variety": 0.5, "dark": 0.0}, warning))
    return [*told, TrainingFinished(steps, "done")]


@cache
def recorded(held: float, movies: str, settings: tuple[tuple[str, Any], ...]) -> dict[str, bytes]:
    """The files that observers write of such a run, by their paths."""
    with TemporaryDirectory() as folder:
        observers = (JsonlLogger(), SampleGridLogger())
        for event in events(Path(folder), held, **dict(settings)):
            for observer in observers:
                observer.see(event)
        for observer in observers:
            observer.close()
        files = [path for path in Path(folder).rglob("*") if path.is_file()]
        return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def fabricate(directory: Path, held: float, **settings: Any) -> Path:
    """The directory of such a run."""
    for name, content in recorded(held, sample_grids.video_suffix(), tuple(settings.items())).items():
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_bytes(content)
    (directory / "config.yaml").write_text(CONFIG % directory.name, encoding="utf-8")
    (directory / "environment.json").write_text(json.dumps({"torch": "9.9.9", "device": "abacus"}), encoding="utf-8")
    return directory


def remember(directory: Path, step: int, changes: Sequence[float]) -> None:
    """A checkpoint in which the guard remembers two looks, each prompt's reward having changed by so much."""
    rows = ([0.5] * len(changes), [0.5 + change for change in changes])
    guard = [{"step": at, "rows": {"reward": row}, "spread": {}} for at, row in zip((0, step), rows, strict=True)]
    place = directory / f"checkpoints/step-{step:06d}"
    place.mkdir(parents=True)
    state = {"format": 1, "step": step, "files": {}, "scaler": None, "extra": {"guard": guard}}
    (place / "state.json").write_text(json.dumps(state), encoding="utf-8")


def evaluate(directory: Path, name: str, score: float) -> None:
    tasks = {"counting": {"strict": {"mean": score, "low": score - 0.05, "high": score + 0.05}}}
    place = directory / "eval" / name
    place.mkdir(parents=True)
    (place / "report.json").write_text(json.dumps({"means": {"strict": score}, "by_tag": tasks}), encoding="utf-8")
