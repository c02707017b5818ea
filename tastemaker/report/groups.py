"""Runs that differ only in their seed, as one group with means and spreads."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import takewhile
from statistics import fmean, stdev

from .run_record import Curve, RunRecord

IGNORED_SETTINGS = ("name", "output_dir")  # differ between any two runs


@dataclass(frozen=True)
class MeanAndSpread:
    """The mean over the runs of a group, and their standard deviation if there are several."""

    mean: float
    spread: float | None = None


@dataclass(frozen=True)
class RunGroup:
    """One run, or several that differ only in their seed."""

    name: str
    records: tuple[RunRecord, ...]

    @property
    def first(self) -> RunRecord:
        return self.records[0]

    @property
    def label(self) -> str:
        """Name of the group, with the seeds if there are several."""
        if len(self.records) == 1:
            return self.name
        seeds = ", ".join(str(record.config.get("seed")) for record in self.records)
        return f"{self.name} ({len(self.records)} seeds: {seeds})"

    def mean_curve(self, metric: str) -> Curve:
        return [(step, value.mean) for step, value in self._points(metric)]

    def band(self, metric: str) -> tuple[Curve, Curve] | None:
        """Return the curves one standard deviation below and above the mean, or None for a single run."""
        points = self._points(metric)
        if not points or any(value.spread is None for _, value in points):
            return None
        low = [(step, value.mean - (value.spread or 0.0)) for step, value in points]
        return low, [(step, value.mean + (value.spread or 0.0)) for step, value in points]

    def average(self, measure: Callable[[RunRecord], float | None]) -> MeanAndSpread | None:
        """Return the mean of a number over the runs that have it."""
        values = [value for record in self.records if (value := measure(record)) is not None]
        return mean_and_spread(values) if values else None

    def _points(self, metric: str) -> list[tuple[int, MeanAndSpread]]:
        """Return the mean and spread at each step that all runs with this metric have."""
        curves = [dict(curve) for record in self.records if (curve := record.curve(metric))]
        if not curves:
            return []
        steps = [step for step in curves[0] if all(step in curve for curve in curves)]
        if not steps:
            steps, curves = list(curves[0]), curves[:1]
        return [(step, mean_and_spread([curve[step] for curve in curves])) for step in steps]


def mean_and_spread(values: Sequence[float]) -> MeanAndSpread:
    return MeanAndSpread(fmean(values), stdev(values) if len(values) > 1 else None)


def group_runs(records: Sequence[RunRecord]) -> list[RunGroup]:
    """Group runs whose settings differ only in the seed. Runs with equal seeds or without settings stay separate."""
    members: dict[str, list[RunRecord]] = {}
    for number, record in enumerate(records):
        settings = {key: value for key, value in record.config.items() if key not in (*IGNORED_SETTINGS, "seed")}
        key = json.dumps(settings, sort_keys=True, default=str)
        seeds = [other.config.get("seed") for other in members.get(key, ())]
        if not settings or "seed" not in record.config or record.config["seed"] in seeds:
            key = f"{number} {key}"
        members.setdefault(key, []).append(record)
    names = [_group_name([record.name for record in group]) for group in members.values()]
    return [
        RunGroup(name if names.count(name) == 1 else group[0].name, tuple(group))
        for name, group in zip(names, members.values(), strict=True)
    ]


def _group_name(names: Sequence[str]) -> str:
    """Return what the names have in common, without a trailing 'seed'."""
    if len(names) == 1:
        return names[0]
    common = "".join(letters[0] for letters in takewhile(lambda each: len(set(each)) == 1, zip(*names, strict=False)))
    return re.sub(r"[\W_]*(seed|s)?[\W_]*$", "", common) or names[0]
