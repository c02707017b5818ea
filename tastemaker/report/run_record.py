"""Read the files of a run directory; missing or damaged files are skipped."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from ..core.registry import ConfigError
from ..training import run_directory
from ..training.drift_statistics import GuardHistory, GuardMeasurement
from ..training.safetensors_io import CheckpointError

Row = Mapping[str, Any]
Curve = list[tuple[int, float]]  # steps and values


@dataclass(frozen=True)
class SampleGrid:
    """The samples of one step: a grid, and where in it each lies."""

    step: int
    path: Path
    prompts: tuple[str, ...]
    scores: Mapping[str, float]
    frames: int
    size: tuple[int, int]  # width and height of a sample
    boxes: tuple[tuple[int, int, int, int], ...]


@dataclass(frozen=True)
class RunRecord:
    """One run."""

    name: str
    directory: Path
    rows: tuple[Row, ...]  # of metrics.jsonl, in order
    sheets: tuple[SampleGrid, ...]
    evaluations: Mapping[str, Row]  # by name
    config: Row
    text: str  # of the configuration
    environment: Row
    looks: tuple[GuardMeasurement, ...] = ()  # of the guard, prompt by prompt, where a checkpoint remembers them
    copies: Row = field(default_factory=dict)  # how good an autoencoder's were in the end

    def curve(self, metric: str) -> Curve:
        return [(row["step"], float(row[metric])) for row in self.rows if _number(row.get(metric))]

    def metrics(self) -> list[str]:
        """All that have a curve, in order of appearance."""
        names = dict.fromkeys(key for row in self.rows for key, value in row.items() if _number(value))
        return [name for name in names if name not in ("step", "seconds", "samples")]

    def total(self, key: str) -> float:
        return sum(float(row[key]) for row in self.rows if _number(row.get(key)))

    @property
    def steps(self) -> int:
        return max((int(row["step"]) for row in self.rows), default=0)

    @property
    def held_out(self) -> tuple[str, ...]:
        """Rewards of weight zero."""
        rewards = self.config.get("rewards")
        found = rewards.items() if isinstance(rewards, Mapping) else ()
        return tuple(name for name, reward in found if isinstance(reward, Mapping) and reward.get("weight") == 0)

    @property
    def best(self) -> str | None:
        """The checkpoint with the highest held-out score, where one is named."""
        link = self.directory / "checkpoints" / "best"
        return link.resolve().name if link.exists() else None


def read_run(directory: Path) -> RunRecord:
    """Everything there is to tell of a run."""
    if not (directory / "metrics.jsonl").is_file():
        raise ConfigError(
            f"{directory} is no run: it has no metrics.jsonl; give the directory of a run, as in runs/demo"
        )
    rows = tuple(row for line in _text(directory / "metrics.jsonl").splitlines() if (row := _row(line)))
    config = _text(directory / "config.yaml")
    sheets = [sheet for path in sorted(directory.glob("samples/step-*.json")) if (sheet := _read_sample_grid(path))]
    last = max((int(row["step"]) for row in rows), default=0)
    evaluated = [path for kind in ("eval", "evaluations") for path in directory.glob(f"{kind}/*/report.json")]
    evaluated.sort(key=lambda path: (path.stat().st_mtime, path))  # the first is before, the last after
    reports = {path.parent.name: _json(path) for path in evaluated}
    return RunRecord(
        name=directory.resolve().name,
        directory=directory,
        rows=rows,
        # Later ones were left by a run that was in this place before.
        sheets=tuple(sheet for sheet in sheets if sheet.step <= last),
        evaluations={name: report for name, report in reports.items() if report},
        config=_parsed(config),
        text=config,
        environment=_json(directory / "environment.json"),
        looks=tuple(look for look in _guard_measurements(directory) if look.step <= last),
        copies=_json(directory / "copies.json"),
    )


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""


def _json(path: Path) -> Row:
    try:
        found = json.loads(_text(path))
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _row(line: str) -> Row | None:
    try:
        found = json.loads(line)
    except ValueError:
        return None
    return found if isinstance(found, dict) and isinstance(found.get("step"), int) else None


def _guard_measurements(directory: Path) -> list[GuardMeasurement]:
    found, history = run_directory.latest(directory), GuardHistory()
    try:
        history.restore(run_directory.read_state(found).extra.get("guard", ()) if found else ())
    except (CheckpointError, KeyError, TypeError, ValueError):
        return []
    return history.looks


def _parsed(text: str) -> Row:
    try:
        found = yaml.safe_load(text)
    except yaml.YAMLError:
        return {}
    return found if isinstance(found, dict) else {}


def _read_sample_grid(path: Path) -> SampleGrid | None:
    found = _json(path)
    try:
        picture = path.with_name(found["file"])
        prompts, boxes = tuple(map(str, found["prompts"])), tuple((a, b, c, d) for a, b, c, d in found["boxes"])
        scores = {str(name): float(score) for name, score in found["scores"].items() if _number(score)}
        width, height = found["size"]
        sheet = SampleGrid(int(found["step"]), picture, prompts, scores, int(found["frames"]), (width, height), boxes)
    except (KeyError, TypeError, ValueError):
        return None
    return sheet if picture.is_file() else None


def _number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
