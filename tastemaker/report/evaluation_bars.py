"""Scores of evaluations, task by task, as bars with their intervals."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from .run_record import RunRecord

OVERALL = "overall"
SET_METRICS = ("frechet", "diversity")  # numbers that only a whole set of pictures has


@dataclass(frozen=True)
class ScoreInterval:
    mean: float
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class EvaluationScores:
    """What one evaluation of one run found: scores by metric and task."""

    name: str
    run: int  # its number, which is its colour
    last: bool  # of its run's
    scores: Mapping[str, Mapping[str, ScoreInterval]]


def collect_evaluations(records: Sequence[RunRecord]) -> list[EvaluationScores]:
    """All that the runs have, in order."""
    found = []
    for run, record in enumerate(records):
        for i, (name, report) in enumerate(record.evaluations.items(), 1):
            label = f"{record.name}: {name}" if len(records) > 1 else name
            found.append(EvaluationScores(label, run, i == len(record.evaluations), _scores(report)))
    return [each for each in found if each.scores]


def _scores(report: Mapping[str, Any]) -> dict[str, dict[str, ScoreInterval]]:
    """Scores by metric and task, whichever of the two comes first in the report, and numbers of the whole set."""
    tables = [(metric, tag, value) for tag, table in _items(report.get("by_tag")) for metric, value in _items(table)]
    tables += [(metric, tag, value) for metric, table in _items(report.get("scores")) for tag, value in _items(table)]
    wholes = [*_items(report.get("means")), *((name, report.get(name)) for name in SET_METRICS)]
    tables = [*((metric, OVERALL, value) for metric, value in wholes), *tables]
    found: dict[str, dict[str, ScoreInterval]] = {}
    for metric, tag, value in sorted(tables, key=lambda row: row[1] != OVERALL):
        if (score := _score(value)) is not None:
            found.setdefault(metric, {})[tag] = score
    return dict(sorted(found.items(), key=lambda item: len(item[1]) == 1))  # those known task by task first


def _items(table: object) -> list[tuple[str, Any]]:
    return [(str(key), value) for key, value in table.items()] if isinstance(table, Mapping) else []


def _score(value: object) -> ScoreInterval | None:
    if isinstance(value, Mapping):
        parts = [value.get(key) for key in ("mean", "low", "high")]
        mean, low, high = (float(part) if isinstance(part, int | float) else None for part in parts)
        return None if mean is None else ScoreInterval(mean, low, high)
    return ScoreInterval(float(value)) if isinstance(value, int | float) and not isinstance(value, bool) else None


def render_bars(found: Sequence[EvaluationScores]) -> str:
    """A card for each metric that is known task by task, and for the others one of their means."""
    metrics = dict.fromkeys(metric for each in found for metric in each.scores)
    return "".join(_card(metric, [each for each in found if metric in each.scores]) for metric in metrics)


def _card(metric: str, found: Sequence[EvaluationScores]) -> str:
    tags = dict.fromkeys(tag for each in found for tag in each.scores[metric])
    every = [score for each in found for score in each.scores[metric].values()]
    top = max([1.0, *(score.high or score.mean for score in every)])
    rows = "".join(_task(tag, metric, found, top) for tag in tags)
    return f'<figure class="card bars"><figcaption><h3>{escape(metric)}</h3></figcaption><dl>{rows}</dl></figure>'


def _task(tag: str, metric: str, found: Sequence[EvaluationScores], top: float) -> str:
    lines = []
    for each in found:
        score = each.scores[metric].get(tag)
        if score is not None:
            lines.append(f"<dd>{_bar(score, top, each)}<span>{_bar_label(score, each.name)}</span></dd>")
    return f"<dt>{escape(tag.replace('_', ' '))}</dt>{''.join(lines)}"


def _bar(score: ScoreInterval, top: float, of: EvaluationScores) -> str:
    def share(value: float) -> str:
        return f"{100 * min(max(value / top, 0.0), 1.0):.1f}%"

    whisker = ""
    if score.low is not None and score.high is not None:
        width = f"{100 * (score.high - score.low) / top:.1f}%"
        whisker = f'<span class="whisker" style="left:{share(score.low)};width:{width}"></span>'
    kind = f"filled run-{of.run % 6 + 1}{'' if of.last else ' earlier'}"
    filled = f'<span class="{kind}" style="width:{share(score.mean)}"></span>'
    return f'<span class="track" aria-hidden="true">{filled}{whisker}</span>'


def _bar_label(score: ScoreInterval, name: str) -> str:
    interval = f" ({score.low:.2f} to {score.high:.2f})" if score.low is not None and score.high is not None else ""
    return f"<b>{score.mean:.3g}</b>{interval} <small>{escape(name)}</small>"
