"""Synthetic run directories with all files that a run writes."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from PIL import Image

from tastemaker.training.checkpoint_folder import partial_path, publish_checkpoint
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
SOURCE_COLORS = ((1.0, 0.0, 0.0), (0.0, 0.0, 1.0))
CONFIG = """\
objective: {type: grpo, group_size: 8}
model: {type: toy_flow}
rewards:
  bright: {type: brightness, weight: 1.0}
  color: {type: color, weight: 0}
name: %s
"""


def events(
    directory: Path, held: float, *, steps: int = 60, frames: int = 1, guard: bool = True, sources: int = 0
) -> list[Event]:
    """Return events of a run whose reward rises while a held-out reward changes by `held`.

    With `sources`, every prompt is about so many images, each of one color.
    """
    rng, recorded = random.Random(0), [TrainingStarted(0, steps, directory, 7)]
    noise = torch.Generator().manual_seed(0)
    for step in range(steps + 1):
        t = step / steps
        values = {
            "reward/mean": 0.2 + 0.6 * t + rng.gauss(0, 0.01),
            "rewards/color": 0.5 + held * t + rng.gauss(0, 0.01),
        }
        if step:
            rewards = {"rewards/bright": values["reward/mean"], "zero_std_groups": 0.1}
            rest = {**rewards, "kl": t, "grad_norm": 0.1, "loss": 0.0}
            recorded.append(StepCompleted(step, {**values, **rest}, 0.5, 64))
        if step % 20 == 0:
            pixels = torch.rand(len(PROMPTS), frames, 3, 16, 16, generator=noise)
            images = torch.tensor(SOURCE_COLORS)[None, :sources, :, None, None].expand(len(PROMPTS), -1, -1, 16, 16)
            scores = {"bright": values["reward/mean"]}
            recorded.append(SamplesGenerated(step, PROMPTS, pixels, scores, images if sources else None))
        if guard and step % 20 == 0:
            warning = (
                f"probable reward hacking: fell from 0.5 to {0.5 + held * t:.2g}" if held < 0 and step > 20 else None
            )
            recorded.append(GuardChecked(step, {**values, "diversity": 0.4, "variety": 0.5, "dark": 0.0}, warning))
    return [*recorded, TrainingFinished(steps, "done")]


@cache
def record_files(held: float, video_suffix: str, settings: tuple[tuple[str, Any], ...]) -> dict[str, bytes]:
    """Return the files that the loggers write, by path."""
    with TemporaryDirectory() as folder:
        loggers = (JsonlLogger(), SampleGridLogger())
        for event in events(Path(folder), held, **dict(settings)):
            for logger in loggers:
                logger.log(event)
        for logger in loggers:
            logger.close()
        files = [path for path in Path(folder).rglob("*") if path.is_file()]
        return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def write_fake_run(directory: Path, held: float, *, seed: int | None = None, **settings: Any) -> Path:
    """Write the directory of a synthetic run. A seed is written to its configuration only."""
    for name, content in record_files(held, sample_grids.video_suffix(), tuple(settings.items())).items():
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_bytes(content)
    config = CONFIG % directory.name + (f"seed: {seed}\n" if seed is not None else "")
    (directory / "config.yaml").write_text(config, encoding="utf-8")
    (directory / "environment.json").write_text(json.dumps({"torch": "9.9.9", "device": "abacus"}), encoding="utf-8")
    return directory


def write_guard_checkpoint(directory: Path, step: int, changes: Sequence[float]) -> None:
    """Write a checkpoint with two measurements of the guard, between which each prompt's reward changed."""
    rows = ([0.5] * len(changes), [0.5 + change for change in changes])
    guard = [{"step": at, "rows": {"reward/mean": row}, "spread": {}} for at, row in zip((0, step), rows, strict=True)]
    folder = directory / f"checkpoints/step-{step:06d}"
    partial = partial_path(folder)
    partial.mkdir(parents=True)
    state = {"format": 2, "step": step, "form": "consolidated", "strategy": "replicated", "world": 1, "versions": {}}
    publish_checkpoint(partial, folder, {**state, "scaler": None, "extra": {"guard": guard}}, {})


def write_evaluation(directory: Path, name: str, score: float, **extra: Any) -> Path:
    """Write the report of an evaluation, with further keys such as its benchmark."""
    tasks = {"counting": {"strict": {"mean": score, "low": score - 0.05, "high": score + 0.05}}}
    folder = directory / "eval" / name
    folder.mkdir(parents=True)
    report = {"means": {"strict": score}, "by_tag": tasks, **extra}
    file = folder / "report.json"
    file.write_text(json.dumps(report), encoding="utf-8")
    # Evaluations are ordered by time, which may be the same for files that are written in quick succession.
    modified = file.stat().st_mtime + len(list(folder.parent.iterdir()))
    os.utime(file, (modified, modified))
    return folder


def write_evaluated_samples(folder: Path, prompts: Sequence[str], verdicts: Sequence[float]) -> None:
    """Write samples of an evaluation with their verdicts, one of each prompt."""
    rows = []
    for index, (prompt, verdict) in enumerate(zip(prompts, verdicts, strict=True)):
        Image.new("RGB", (16, 16), (255 * int(verdict), 99, index)).save(folder / f"{index}.png")
        reasons = [] if verdict else [f"expected <b>{prompt}</b>, found nothing"]
        row = {
            "file": f"{index}.png",
            "index": index,
            "seed": 0,
            "prompt": prompt,
            "strict": verdict,
            "reasons": reasons,
        }
        rows.append(json.dumps(row))
    (folder / "scores.jsonl").write_text("\n".join(rows), encoding="utf-8")
