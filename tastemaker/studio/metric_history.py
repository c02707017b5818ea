"""Curves of a run that follow its metrics.jsonl: read by offset, and reduced to a bounded number of points."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

METRICS_FILE = "metrics.jsonl"
MAX_POINTS = 400  # of a curve; more than a chart has pixels
MAX_METRICS = 300
MAX_WARNINGS = 50
MAX_READ_BYTES = 8 * 2**20  # at once, so that a long file does not fill the memory
MAX_LINE_BYTES = 2**20
TIMED_PHASES = ("time/rollout", "time/data", "time/reward", "time/update")
HIDDEN = ("step", "samples", "warning")


class DownsampledCurve:
    """A curve in which each point is the mean of `stride` values. The stride doubles when there are too many points."""

    def __init__(self) -> None:
        self.stride = 1
        self.last = math.nan  # the newest value
        self._points: list[tuple[int, float]] = []
        self._sum, self._count, self._step = 0.0, 0, 0  # of the point that is not complete

    def add(self, step: int, value: float) -> None:
        self._sum, self._count, self._step, self.last = self._sum + value, self._count + 1, step, value
        if self._count < self.stride:
            return
        self._points.append((step, self._sum / self._count))
        self._sum, self._count = 0.0, 0
        if len(self._points) >= MAX_POINTS:
            pairs = zip(self._points[::2], self._points[1::2], strict=True)
            self._points = [(last[0], (first[1] + last[1]) / 2) for first, last in pairs]
            self.stride *= 2

    @property
    def num_complete(self) -> int:
        """How many points will not change until the stride does."""
        return len(self._points)

    def points(self, start: int = 0) -> list[tuple[int, float]]:
        """Return the points from an index on, with the mean of the values that do not fill a point yet."""
        pending = [(self._step, self._sum / self._count)] if self._count else []
        return [*self._points[start:], *pending]


@dataclass
class MetricHistory:
    """Everything that the page of a run shows of metrics.jsonl."""

    path: Path
    curves: dict[str, DownsampledCurve] = field(default_factory=dict)
    warnings: list[tuple[int, str]] = field(default_factory=list)  # steps and texts of the guard
    step: int = 0
    generation: int = 0  # changes when the file was replaced, as by a resumed run
    _offset: int = 0
    _identity: tuple[int, int] = (0, 0)

    def update(self) -> bool:
        """Read the rows that were added since the last call. Returns whether there were any, or the file is new."""
        try:
            with self.path.open("rb") as file:
                info = os.fstat(file.fileno())
                replaced = (info.st_dev, info.st_ino) != self._identity or info.st_size < self._offset
                if replaced:
                    self._reset((info.st_dev, info.st_ino))
                file.seek(self._offset)
                changed = replaced
                while chunk := file.read(MAX_READ_BYTES):
                    complete = chunk.rfind(b"\n") + 1
                    if not complete and len(chunk) < MAX_LINE_BYTES:
                        break  # the last row is still being written
                    complete = complete or len(chunk)  # no row is so long: the file is damaged
                    for line in chunk[:complete].splitlines():
                        self._add_line(line)
                    self._offset += complete
                    file.seek(self._offset)
                    changed = True
        except OSError:
            return False
        return changed

    def _reset(self, identity: tuple[int, int]) -> None:
        self.curves, self.warnings, self.step = {}, [], 0
        self.generation, self._offset, self._identity = self.generation + 1, 0, identity

    def _add_line(self, line: bytes) -> None:
        row = parse_row(line)
        if row is None:
            return
        step = row["step"]
        self.step = max(self.step, step)
        if isinstance(warning := row.get("warning"), str):
            self.warnings = [*self.warnings, (step, warning)][-MAX_WARNINGS:]
        for name, value in (*row.items(), *compute_time_shares(row)):
            if name in HIDDEN or not is_number(value):
                continue
            if name not in self.curves and len(self.curves) < MAX_METRICS:
                self.curves[name] = DownsampledCurve()
            if name in self.curves:
                self.curves[name].add(step, value)


def parse_row(line: bytes | str) -> dict[str, Any] | None:
    """Parse a row of metrics.jsonl; None if it is damaged."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    step = row.get("step") if isinstance(row, dict) else None
    return row if isinstance(step, int) and not isinstance(step, bool) else None


def is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def compute_time_shares(row: Mapping[str, Any]) -> list[tuple[str, float]]:
    """Return the share of each phase in the time of a step, in percent, as share/PHASE."""
    total = row.get("time/step")
    if not is_number(total) or not total:
        return []
    phases = [(name.replace("time/", "share/"), row.get(name)) for name in TIMED_PHASES]
    return [(name, 100 * value / total) for name, value in phases if value is not None and is_number(value)]
