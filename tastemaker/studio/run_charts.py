"""Which charts a page shows, in which order and under which names, for one run or for several in comparison."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..report.metric_names import name_metric
from ..report.run_record import RunRecord
from .metric_history import MetricHistory

REWARDS, HEALTH, GUARD, TIME, MORE = "Rewards", "Optimization", "Guard", "Time", "More"
HEALTH_METRICS = ("kl", "guard/diversity", "grad_norm", "loss/policy", "loss", "zero_std_groups", "clip_fraction", "lr")
SHARES = "share/"
SPEED = "samples_per_second"
PHASES = {"rollout": "generation", "data": "data", "reward": "rewards", "update": "update"}


@dataclass(frozen=True)
class Chart:
    """One chart: its title, and the curves in it as pairs of run and metric."""

    id: str
    group: str
    title: str
    note: str
    series: tuple[tuple[int, str, str], ...]  # index of the run, metric, label; the color follows from the position

    def to_json(self) -> dict[str, Any]:
        series = [
            {"key": f"{run}:{metric}", "label": label, "color": number if self.id == "shares" else run}
            for number, (run, metric, label) in enumerate(self.series)
        ]
        return {"id": self.id, "group": self.group, "title": self.title, "note": self.note, "series": series}


def list_charts(
    histories: Sequence[MetricHistory], configs: Sequence[Mapping[str, Any]], labels: Sequence[str]
) -> list[Chart]:
    """Return the charts for the metrics that the runs have so far."""
    records = [
        make_record(label, history, config) for label, history, config in zip(labels, histories, configs, strict=True)
    ]
    names = list(dict.fromkeys(name for history in histories for name in history.curves))
    held_out = {name for record in records for name in record.held_out}
    plain = [name for name in names if not name.startswith((SHARES, "time/"))]
    charts = []
    for metric in sorted(plain, key=lambda name: _order(name, held_out)):
        name = name_metric(metric, records)
        note = "; ".join(text for text in (name.better, name.explanation) if text)
        runs = [number for number, history in enumerate(histories) if metric in history.curves]
        series = tuple((run, metric, labels[run]) for run in runs)
        title = "samples per second" if metric == SPEED else name.title
        charts.append(Chart(metric, _group(metric, held_out), title, note, series))
    return _insert_shares(charts, histories, labels)


def make_record(label: str, history: MetricHistory, config: Mapping[str, Any]) -> RunRecord:
    """Return a record with one row of the newest values, from which metrics get their names."""
    row = {"step": history.step, **{name: curve.last for name, curve in history.curves.items()}}
    return RunRecord(label, Path(), (row,), (), {}, config, "", {})


def _insert_shares(charts: list[Chart], histories: Sequence[MetricHistory], labels: Sequence[str]) -> list[Chart]:
    """Add the chart of time shares before the charts of the group More. Several runs get one chart per phase."""
    phases = list(dict.fromkeys(name for history in histories for name in history.curves if name.startswith(SHARES)))
    note = "percent of the time of a step"
    if len(histories) == 1:
        series = tuple((0, phase, PHASES.get(phase.removeprefix(SHARES), phase)) for phase in phases)
        added = [Chart("shares", TIME, "time shares", note, series)] if series else []
    else:
        added = [
            Chart(
                phase,
                TIME,
                f"time share: {PHASES.get(phase.removeprefix(SHARES), phase)}",
                note,
                tuple((run, phase, labels[run]) for run, each in enumerate(histories) if phase in each.curves),
            )
            for phase in phases
        ]
    before = [chart for chart in charts if chart.group != MORE]
    return [*before, *added, *(chart for chart in charts if chart.group == MORE)]


def _group(metric: str, held_out: set[str]) -> str:
    if metric == "reward/mean" or metric.startswith("rewards/") or metric.removeprefix("guard/rewards/") in held_out:
        return REWARDS
    if metric in HEALTH_METRICS:
        return HEALTH
    if metric == SPEED:
        return TIME
    return GUARD if metric.startswith("guard/") else MORE


def _order(metric: str, held_out: set[str]) -> tuple[int, int, str]:
    """Rewards first, then those that are held out, then how the optimization goes, then the rest by name."""
    group = (REWARDS, HEALTH, TIME, GUARD, MORE).index(_group(metric, held_out))
    if group == 0:
        place = 0 if metric == "reward/mean" else 1 + (metric.rpartition("rewards/")[2] in held_out)
    else:
        place = HEALTH_METRICS.index(metric) if metric in HEALTH_METRICS else 0
    return group, place, metric
