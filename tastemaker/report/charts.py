"""Charts of the report: training curves as SVG small multiples, and evaluation scores as bars."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from statistics import fmean
from typing import Any

from .groups import RunGroup, mean_and_spread
from .metric_names import METRIC_NAMES, MetricName, name_metric, name_score, name_task
from .run_record import Curve

WIDTH, HEIGHT = 340, 190
LEFT, RIGHT, TOP, BOTTOM = 46, 10, 10, 24
MAX_POINTS = 240  # more than a small chart has pixels
MIN_SMOOTHED_POINTS = 24  # longer curves are drawn smoothed, over the raw curve in a faint line
NUM_COLORS = 6
OVERALL = "overall"
SET_METRICS = ("frechet", "diversity")  # metrics of a whole set of samples, which have no value per task
MAIN_METRICS = ("reward/mean", "kl", "grad_norm", "loss/policy", "loss")


def color_class(run: int) -> str:
    """CSS class with the color of a run."""
    return f"run-{run % NUM_COLORS + 1}"


def format_number(value: float) -> str:
    """Format with three significant digits, or two if the value is small."""
    return f"{value:.3g}" if abs(value) >= 0.1 else f"{value:.2g}"


# Axes and single charts


@dataclass(frozen=True)
class Axis:
    """A range of values with round ticks."""

    low: float
    high: float
    step: float

    @property
    def ticks(self) -> list[float]:
        first = math.ceil(self.low / self.step - 1e-9)
        return [k * self.step for k in range(first, math.floor(self.high / self.step + 1e-9) + 1)]

    def position(self, value: float, start: float, end: float) -> float:
        """Map a value to the coordinate between `start` (at `low`) and `end` (at `high`)."""
        return start + (value - self.low) / (self.high - self.low) * (end - start)

    def label(self, value: float) -> str:
        if abs(value) >= 10_000:
            return f"{value / 1000:g}k"
        digits = max(0, -math.floor(math.log10(self.step) + 1e-9))
        return f"{value:.0e}" if digits > 4 and value else f"{value:.{min(digits, 4)}f}"


def nice_axis(low: float, high: float, count: int = 4) -> Axis:
    """Return an axis with about `count` ticks at multiples of 1, 2 or 5, slightly wider than the values."""
    if high - low < 1e-9 * max(1.0, abs(high)):
        spread = abs(high) / 2 or 1.0
        low, high = low - spread, high + spread
    rough = (high - low) / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= rough * 0.999)
    margin = (high - low) * 0.06
    return Axis(low - margin, high + margin, step)


def downsample_curve(curve: Curve) -> Curve:
    """Reduce a curve to at most MAX_POINTS points, each the mean of its neighborhood."""
    if len(curve) <= MAX_POINTS:
        return curve
    size = math.ceil(len(curve) / MAX_POINTS)
    chunks = [curve[i : i + size] for i in range(0, len(curve), size)]
    return [(chunk[-1][0], fmean(value for _, value in chunk)) for chunk in chunks]


def smooth_curve(curve: Curve) -> Curve:
    """Running means over about a tenth of the curve. The window is narrow at the start, where training is fast."""
    radius = max(1, len(curve) // 20)
    values = [value for _, value in curve]
    means = []
    for i in range(len(curve)):
        reach = min(radius, i)
        means.append(fmean(values[i - reach : i + reach + 1]))
    return [(step, mean) for (step, _), mean in zip(curve, means, strict=True)]


def curve_ends(curve: Curve) -> tuple[float, float]:
    """Return the first and the last value of a curve as it is drawn: long curves are smoothed."""
    drawn = smooth_curve(curve) if len(curve) >= MIN_SMOOTHED_POINTS else curve
    return drawn[0][1], drawn[-1][1]


def draw_chart(
    title: str,
    curves: Sequence[tuple[str, Curve]],
    identity: str,
    bands: Sequence[tuple[Curve, Curve] | None] = (),
) -> str:
    """Draw one metric of several runs as SVG. The SVG title describes the curves for screen readers.

    A band has the lower and the upper curve of the spread around the curve in the same place.
    """
    curves = [(name, downsample_curve(curve)) for name, curve in curves]
    areas = [
        (run, downsample_curve(band[0]), downsample_curve(band[1]))
        for run, band in enumerate(bands)
        if band is not None
    ]
    points = [point for _, curve in curves for point in curve]
    points += [point for _, low, high in areas for point in (*low, *high)]
    steps, values = [step for step, _ in points], [value for _, value in points]
    first = 0 if min(steps) <= 0.1 * max(steps) else min(steps)
    x_axis, y_axis = Axis(first, max(max(steps), first + 1), 1), nice_axis(min(values), max(values))
    lines = "".join(_area(run, low, high, x_axis, y_axis) for run, low, high in areas if len(low) > 1)
    lines += "".join(_line(run, curve, x_axis, y_axis) for run, (_, curve) in enumerate(curves) if curve)
    description = "; ".join(f"{name}: {describe_change(curve)}" for name, curve in curves if curve)
    return (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-labelledby="{identity}">'
        f'<title id="{identity}">{escape(f"{title}, {description}")}</title>{_frame(x_axis, y_axis)}{lines}</svg>'
    )


def describe_change(curve: Curve) -> str:
    (first, start), (last, end) = smooth_curve(curve)[0], smooth_curve(curve)[-1]
    return f"from {start:.3g} at step {first} to {end:.3g} at step {last}"


def _frame(x_axis: Axis, y_axis: Axis) -> str:
    parts = []
    for value in y_axis.ticks:
        y = y_axis.position(value, HEIGHT - BOTTOM, TOP)
        parts.append(f'<line class="rule" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{y_axis.label(value)}</text>')
    steps = nice_axis(x_axis.low, x_axis.high)
    for value in Axis(x_axis.low, x_axis.high, max(1.0, steps.step)).ticks:
        x = x_axis.position(value, LEFT, WIDTH - RIGHT)
        anchor = "end" if x > WIDTH - RIGHT - 14 else "middle"
        parts.append(f'<text x="{x:.1f}" y="{HEIGHT - 6}" text-anchor="{anchor}">{steps.label(value)}</text>')
    base = HEIGHT - BOTTOM
    return "".join([*parts, f'<line class="base" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{base}" y2="{base}"/>'])


def _line(run: int, curve: Curve, x_axis: Axis, y_axis: Axis) -> str:
    color = color_class(run)
    if len(curve) == 1:
        ((x, y),) = _coordinates(curve, x_axis, y_axis)
        return f'<circle class="{color}" cx="{x:.1f}" cy="{y:.1f}" r="3"/>'
    if len(curve) >= MIN_SMOOTHED_POINTS:
        raw = f'<polyline class="faint {color}" points="{_points(curve, x_axis, y_axis)}"/>'
        return f'{raw}<polyline class="{color}" points="{_points(smooth_curve(curve), x_axis, y_axis)}"/>'
    dots = "".join(
        f'<circle class="{color}" cx="{x:.1f}" cy="{y:.1f}" r="2.2"/>' for x, y in _coordinates(curve, x_axis, y_axis)
    )
    return f'<polyline class="{color}" points="{_points(curve, x_axis, y_axis)}"/>{dots}'


def _area(run: int, low: Curve, high: Curve, x_axis: Axis, y_axis: Axis) -> str:
    if len(low) >= MIN_SMOOTHED_POINTS:
        low, high = smooth_curve(low), smooth_curve(high)
    points = _points([*low, *reversed(high)], x_axis, y_axis)
    return f'<polygon class="band {color_class(run)}" points="{points}"/>'


def _coordinates(curve: Curve, x_axis: Axis, y_axis: Axis) -> list[tuple[float, float]]:
    return [
        (x_axis.position(step, LEFT, WIDTH - RIGHT), y_axis.position(value, HEIGHT - BOTTOM, TOP))
        for step, value in curve
    ]


def _points(curve: Curve, x_axis: Axis, y_axis: Axis) -> str:
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in _coordinates(curve, x_axis, y_axis))


# Training curves


def render_curves(groups: Sequence[RunGroup]) -> str:
    """Render a chart for each metric: rewards and optimization, the guard's metrics, and the rest folded away."""
    records = [record for group in groups for record in group.records]
    names = list(dict.fromkeys(name for record in records for name in record.metric_names()))
    components = [name for name in names if name.startswith("rewards/")]
    # A single reward component equals the total reward and would be drawn twice.
    distinct = [
        name for name in components if any(record.curve(name) != record.curve("reward/mean") for record in records)
    ]
    main = [name for name in (MAIN_METRICS[0], *distinct, *MAIN_METRICS[1:]) if name in names]
    held_out = {f"guard/rewards/{name}" for record in records for name in record.held_out}
    # Likewise on the guard's prompts.
    repeated = {
        name
        for name in names
        if name.startswith("guard/rewards/")
        and all(record.curve(name) == record.curve("guard/reward/mean") for record in records)
    }
    guard = sorted(
        (name for name in names if name.startswith("guard/") and name not in repeated),
        key=lambda name: (name not in held_out, list(METRIC_NAMES).index(name) if name in METRIC_NAMES else 0),
    )
    rest = [name for name in names if name not in {*main, *components, *guard, *repeated}]
    html = _curve_cards(groups, main)
    if guard:
        text = "The guard samples fixed prompts from fixed noise and measures what the training reward may miss."
        html += f'<h3 class="group" id="guard">Guard</h3><p class="quiet">{text}</p>{_curve_cards(groups, guard)}'
    if rest:
        html += f"<details><summary>{len(rest)} more metrics</summary>{_curve_cards(groups, rest)}</details>"
    return html


def _curve_cards(groups: Sequence[RunGroup], metrics: Sequence[str]) -> str:
    return f'<div class="cards">{"".join(_curve_card(groups, metric) for metric in metrics)}</div>'


def _curve_card(groups: Sequence[RunGroup], metric: str) -> str:
    name = name_metric(metric, [record for group in groups for record in group.records])
    curves = [(group.label, group.mean_curve(metric)) for group in groups]
    ends = "".join(
        f"<span>{_color_key(index) if len(groups) > 1 else ''}{format_change(group, metric)}</span> "
        for index, group in enumerate(groups)
        if group.mean_curve(metric)
    )
    identity = "c-" + "".join(character if character.isalnum() else "-" for character in metric)
    chart = draw_chart(name.title, curves, identity, [group.band(metric) for group in groups])
    return (
        f'<figure class="card curve"><figcaption><h3>{escape(name.title)}</h3><p class="ends">{ends}</p></figcaption>'
        f"{chart}{_metric_note(name)}</figure>"
    )


def _color_key(index: int) -> str:
    return f'<span class="key {color_class(index)}"></span>'


def _metric_note(name: MetricName) -> str:
    """Render which direction is better and what the metric is."""
    texts = [f"<b>{name.better}</b>" if name.better else "", escape(name.explanation)]
    return f"<p>{'; '.join(text for text in texts if text)}</p>" if any(texts) else ""


def format_change(group: RunGroup, metric: str) -> str:
    """Format the first and last value of a metric, as HTML, with the spread of the last over seeds."""
    ends = [curve_ends(curve) for record in group.records if (curve := record.curve(metric))]
    first, last = mean_and_spread([start for start, _ in ends]), mean_and_spread([end for _, end in ends])
    spread = f" <i>&plusmn; {format_number(last.spread)}</i>" if last.spread is not None else ""
    return f"<i>{format_number(first.mean)} &rarr;</i> {format_number(last.mean)}{spread}"


# Evaluation scores


@dataclass(frozen=True)
class ScoreInterval:
    """A mean score with the bounds of its confidence interval, if known."""

    mean: float
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class EvaluationScores:
    """Scores of one evaluation of one run, by metric and task."""

    name: str
    run: int  # index of the run, which determines the color
    is_last: bool  # whether it is the run's latest evaluation
    scores: Mapping[str, Mapping[str, ScoreInterval]]


def collect_evaluations(groups: Sequence[RunGroup]) -> list[EvaluationScores]:
    """Return all evaluations that have scores, in order. Evaluations of the same name are averaged over seeds."""
    evaluations = []
    for run, group in enumerate(groups):
        names = dict.fromkeys(name for record in group.records for name in record.evaluations)
        for number, name in enumerate(names, 1):
            tables = [parse_scores(record.evaluations[name]) for record in group.records if name in record.evaluations]
            label = f"{group.label}: {name}" if len(groups) > 1 else name
            scores = tables[0] if len(tables) == 1 else _average_scores(tables)
            evaluations.append(EvaluationScores(label, run, number == len(names), scores))
    return [evaluation for evaluation in evaluations if evaluation.scores]


def _average_scores(
    tables: Sequence[Mapping[str, Mapping[str, ScoreInterval]]],
) -> dict[str, dict[str, ScoreInterval]]:
    """Return means over seeds, each with an interval of one standard deviation to both sides."""
    averages: dict[str, dict[str, ScoreInterval]] = {}
    for metric, tasks in tables[0].items():
        for task in tasks:
            means = [table[metric][task].mean for table in tables if task in table.get(metric, {})]
            value = mean_and_spread(means)
            spread = value.spread or 0.0
            averages.setdefault(metric, {})[task] = ScoreInterval(value.mean, value.mean - spread, value.mean + spread)
    return averages


def parse_scores(report: Mapping[str, Any]) -> dict[str, dict[str, ScoreInterval]]:
    """Read scores by metric and task from a report that nests them in either order, and metrics of the whole set."""
    entries = [*_items(report.get("means")), *((name, report.get(name)) for name in SET_METRICS)]
    cells = [(metric, OVERALL, value) for metric, value in entries]
    cells += [(metric, task, value) for task, table in _items(report.get("by_tag")) for metric, value in _items(table)]
    cells += [(metric, task, value) for metric, table in _items(report.get("scores")) for task, value in _items(table)]
    scores: dict[str, dict[str, ScoreInterval]] = {}
    for metric, task, value in sorted(cells, key=lambda cell: cell[1] != OVERALL):
        if (score := _parse_score(value)) is not None:
            scores.setdefault(metric, {})[task] = score
    return dict(sorted(scores.items(), key=lambda item: len(item[1]) == 1))  # metrics with a value per task first


def _items(table: object) -> list[tuple[str, Any]]:
    return [(str(key), value) for key, value in table.items()] if isinstance(table, Mapping) else []


def _parse_score(value: object) -> ScoreInterval | None:
    if isinstance(value, Mapping):
        numbers = [value.get(key) for key in ("mean", "low", "high")]
        mean, low, high = (float(number) if isinstance(number, int | float) else None for number in numbers)
        return None if mean is None else ScoreInterval(mean, low, high)
    return ScoreInterval(float(value)) if isinstance(value, int | float) and not isinstance(value, bool) else None


def render_bars(evaluations: Sequence[EvaluationScores]) -> str:
    """Render a card of bars for each metric, with a group of bars for each task."""
    metrics = dict.fromkeys(metric for evaluation in evaluations for metric in evaluation.scores)
    return "".join(
        _bar_card(metric, [evaluation for evaluation in evaluations if metric in evaluation.scores])
        for metric in metrics
    )


def _bar_card(metric: str, evaluations: Sequence[EvaluationScores]) -> str:
    tasks = dict.fromkeys(task for evaluation in evaluations for task in evaluation.scores[metric])
    scores = [score for evaluation in evaluations for score in evaluation.scores[metric].values()]
    top = max([1.0, *(score.high or score.mean for score in scores)])
    groups = "".join(_task_bars(task, metric, evaluations, top) for task in tasks)
    name = name_score(metric)
    heading = f"<h3>{escape(name.title)}</h3>{_metric_note(name)}"
    return f'<figure class="card bars"><figcaption>{heading}</figcaption><dl>{groups}</dl></figure>'


def _task_bars(task: str, metric: str, evaluations: Sequence[EvaluationScores], top: float) -> str:
    bars = [
        f"<dd>{_bar(score, top, evaluation)}<span>{_bar_label(score, evaluation.name)}</span></dd>"
        for evaluation in evaluations
        if (score := evaluation.scores[metric].get(task)) is not None
    ]
    return f"<dt>{escape(name_task(task))}</dt>{''.join(bars)}"


def _bar(score: ScoreInterval, top: float, evaluation: EvaluationScores) -> str:
    def percent(value: float) -> str:
        return f"{100 * min(max(value / top, 0.0), 1.0):.1f}%"

    whisker = ""
    if score.low is not None and score.high is not None:
        width = f"{100 * (score.high - score.low) / top:.1f}%"
        whisker = f'<span class="whisker" style="left:{percent(score.low)};width:{width}"></span>'
    classes = f"filled {color_class(evaluation.run)}{'' if evaluation.is_last else ' earlier'}"
    filled = f'<span class="{classes}" style="width:{percent(score.mean)}"></span>'
    return f'<span class="track" aria-hidden="true">{filled}{whisker}</span>'


def _bar_label(score: ScoreInterval, name: str) -> str:
    interval = f" ({score.low:.2f} to {score.high:.2f})" if score.low is not None and score.high is not None else ""
    return f"<b>{score.mean:.3g}</b>{interval} <small>{escape(name)}</small>"
