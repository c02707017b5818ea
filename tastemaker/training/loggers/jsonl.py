"""metrics.jsonl: one JSON object per step, and one per check of the guard."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import IO

from ...core.errors import ConfigError
from ...core.output_paths import replace_file
from ...core.safe_files import parse_json
from ..events import Event, GuardChecked, StepCompleted, TrainingStarted


class JsonlLogger:
    """Appends step, samples, metrics and timings of every step; values that are not finite become null.

    A check of the guard is a row of its own with guard/METRIC, and `warning` if there is one.
    """

    def __init__(self) -> None:
        self._file: IO[str] | None = None

    def log(self, event: Event) -> None:
        if isinstance(event, TrainingStarted):
            self.close()
            path = event.directory / "metrics.jsonl"
            path.parent.mkdir(parents=True, exist_ok=True)
            truncate_after(path, event.step or -1)  # a new run checks the guard at step 0 again
            self._file = path.open("a", encoding="utf-8")
        elif isinstance(event, StepCompleted):
            self._write({**event.scalars(), "step": event.step, "samples": event.samples})
        elif isinstance(event, GuardChecked):
            warning = {"warning": event.warning} if event.warning else {}
            self._write({"step": event.step, **{f"guard/{k}": x for k, x in event.metrics.items()}, **warning})

    def _write(self, row: Mapping[str, float | str]) -> None:
        if self._file:
            self._file.write(json.dumps({key: _finite(value) for key, value in row.items()}) + "\n")
            self._file.flush()

    def close(self) -> None:
        if self._file:
            self._file.close()
        self._file = None


def truncate_after(path: Path, step: int) -> None:
    """Drop rows after `step` and rows that were cut off by a kill, so that no step is written twice."""
    if not path.exists():
        return
    with (
        path.open(encoding="utf-8", errors="replace") as old,
        replace_file(path) as partial,
        partial.open("w", encoding="utf-8") as new,
    ):
        new.writelines(line for line in old if _step(line) <= step)


def _step(line: str) -> float:
    """Return the step of a row; infinity if the row is incomplete."""
    try:
        row = parse_json(line, "metrics.jsonl")
    except ConfigError:
        return math.inf
    complete = line.endswith("\n") and isinstance(row, dict) and isinstance(row.get("step"), int)
    return int(row["step"]) if complete else math.inf


def _finite(value: float | str) -> float | str | None:
    return value if isinstance(value, str) or math.isfinite(value) else None
