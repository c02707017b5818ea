"""Charts of the report: training curves as SVG small multiples, and evaluation scores as bars."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from statistics import fmean
from typing import Any

from .run_record import Curve, RunRecord

WIDTH, HEIGHT = 340, 190
LEFT, RIGHT, TOP, BOTTOM = 46, 10, 10, 24
MAX_POINTS = 240  # more than a small chart has pixels
MIN_SMOOTHED_POINTS = 24  # longer curves are drawn smoothed, over the raw curve in a faint line
NUM_COLORS = 6
OVERALL = "overall"
SET_METRICS = ("frechet", "diversity")  # metrics of a whole set of samples, which have no value per task
MAIN_METRICS = ("reward/mean", "kl", "grad_norm", "loss/policy", "loss")
METRIC_TITLES = {
    "reward/mean": ("training reward", "mean reward of the samples that the model is trained on"),
    "kl": ("KL to the reference", "divergence of the policy from the reference model"),
    "grad_norm": ("gradient norm", ""),
    "loss/policy": ("loss", ""),
    "loss": ("loss", ""),
    "guard/reward/mean": ("training reward, fixed prompts", "always the same prompts and noise"),
    "guard/diversity": ("diversity within prompts", "distance between samples of one prompt; 0 if all are equal"),
    "guard/variety": ("variety between prompts", "distance between samples of different prompts"),
    "guard/entropy": ("entropy", "of the brightness, in bits; low for blank images"),
    "guard/edges": ("edges", "share of pixels where the brightness jumps"),
    "guard/saturation": ("saturation", ""),
    "guard/motion": ("motion", "of videos, in percent of the frame size per frame; 0 if frozen"),
    "guard/frames": ("frame difference", "how much the frames of a video differ"),
    "guard/flicker": ("flicker", "of videos; 0 if steady"),
    "guard/dark": ("dark pixels", "share of dark pixels"),
}


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


def draw_chart(title: str, curves: Sequence[tuple[str, Curve]], identity: str) -> str:
    """Draw one metric of several runs as SVG. The SVG title describes the curves for screen readers."""
    curves = [(name, downsample_curve(curve)) for name, curve in curves]
    points = [point for _, curve in curves for point in curve]
    steps, values = [step for step, _ in points], [value for _, value in points]
    first = 0 if min(steps) <= 0.1 * max(steps) else min(steps)
    x_axis, y_axis = Axis(first, max(max(steps), first + 1), 1), nice_axis(min(values), max(values))
    lines = "".join(_line(run, curve, x_axis, y_axis) for run, (_, curve) in enumerate(curves) if curve)
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


def _coordinates(curve: Curve, x_axis: Axis, y_axis: Axis) -> list[tuple[float, float]]:
    return [
        (x_axis.position(step, LEFT, WIDTH - RIGHT), y_axis.position(value, HEIGHT - BOTTOM, TOP))
        for step, value in curve
    ]


def _points(curve: Curve, x_axis: Axis, y_axis: Axis) -> str:
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in _coordinates(curve, x_axis, y_axis))


# Training curves


def render_curves(records: Sequence[RunRecord]) -> str:
    """Render a chart for each metric: rewards and optimization, the guard's metrics, and the rest folded away."""
    names = list(dict.fromkeys(name for record in records for name in record.metric_names()))
    components = [name for name in names if name.startswith("rewards/")]
    # A single reward component equals the total reward and would be drawn twice.
    distinct = [
        name for name in components if any(record.curve(name) != record.curve("reward/mean") for record in records)
    ]
    main = [name for name in (MAIN_METRICS[0], *distinct, *MAIN_METRICS[1:]) if name in names]
    held_out = {f"guard/rewards/{name}" for record in records for name in record.held_out}
    guard = sorted(
        (name for name in names if name.startswith("guard/")),
        key=lambda name: (name not in held_out, list(METRIC_TITLES).index(name) if name in METRIC_TITLES else 0),
    )
    rest = [name for name in names if name not in {*main, *components, *guard}]
    html = _curve_cards(records, main)
    if guard:
        text = "The guard samples fixed prompts from fixed noise and measures what the training reward may miss."
        html += f'<h3 class="group" id="guard">Guard</h3><p class="quiet">{text}</p>{_curve_cards(records, guard)}'
    if rest:
        html += f"<details><summary>{len(rest)} more metrics</summary>{_curve_cards(records, rest)}</details>"
    return html


def _curve_cards(records: Sequence[RunRecord], metrics: Sequence[str]) -> str:
    return f'<div class="cards">{"".join(_curve_card(records, metric) for metric in metrics)}</div>'


def _curve_card(records: Sequence[RunRecord], metric: str) -> str:
    title, explanation = _metric_title(records, metric)
    curves = [(record.name, record.curve(metric)) for record in records]
    ends = "".join(_first_and_last(run, curve, len(records)) for run, (_, curve) in enumerate(curves) if curve)
    note = f"<p>{escape(explanation)}</p>" if explanation else ""
    identity = "c-" + "".join(character if character.isalnum() else "-" for character in metric)
    return (
        f'<figure class="card curve"><figcaption><h3>{escape(title)}</h3><p class="ends">{ends}</p></figcaption>'
        f"{draw_chart(title, curves, identity)}{note}</figure>"
    )


def _metric_title(records: Sequence[RunRecord], metric: str) -> tuple[str, str]:
    """Return the title of a metric and a short explanation, which may be empty."""
    if metric in METRIC_TITLES:
        return METRIC_TITLES[metric]
    name = metric.rpartition("rewards/")[2]
    holders = [record.name for record in records if name in record.held_out and record.curve(metric)]
    if "rewards/" in metric and holders:
        in_every_run = len(holders) == sum(bool(record.curve(metric)) for record in records)
        if in_every_run:
            return f"{name}, held out", "weight 0: measured, never trained on"
        return name, f"held out in {', '.join(holders)}"
    if metric.startswith("guard/rewards/"):
        return f"{name}, fixed prompts", ""
    return (f"reward: {name}", "") if metric.startswith("rewards/") else (metric.replace("_", " "), "")


def _first_and_last(run: int, curve: Curve, num_runs: int) -> str:
    smoothed = smooth_curve(curve)
    key = f'<span class="key {color_class(run)}"></span>' if num_runs > 1 else ""
    return f"<span>{key}{format_number(smoothed[0][1])} &rarr; {format_number(smoothed[-1][1])}</span> "


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


def collect_evaluations(records: Sequence[RunRecord]) -> list[EvaluationScores]:
    """Return all evaluations of the runs that have scores, in order."""
    evaluations = []
    for run, record in enumerate(records):
        for number, (name, report) in enumerate(record.evaluations.items(), 1):
            label = f"{record.name}: {name}" if len(records) > 1 else name
            evaluations.append(EvaluationScores(label, run, number == len(record.evaluations), _parse_scores(report)))
    return [evaluation for evaluation in evaluations if evaluation.scores]


def _parse_scores(report: Mapping[str, Any]) -> dict[str, dict[str, ScoreInterval]]:
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
    return f'<figure class="card bars"><figcaption><h3>{escape(metric)}</h3></figcaption><dl>{groups}</dl></figure>'


def _task_bars(task: str, metric: str, evaluations: Sequence[EvaluationScores], top: float) -> str:
    bars = [
        f"<dd>{_bar(score, top, evaluation)}<span>{_bar_label(score, evaluation.name)}</span></dd>"
        for evaluation in evaluations
        if (score := evaluation.scores[metric].get(task)) is not None
    ]
    return f"<dt>{escape(task.replace('_', ' '))}</dt>{''.join(bars)}"


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
