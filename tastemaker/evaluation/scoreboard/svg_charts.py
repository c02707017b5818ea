"""Figures of the scoreboard as SVG, with their own background, so that they work on light and dark pages."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from itertools import groupby
from statistics import fmean

from ...report.charts import Axis, draw_chart, nice_axis
from ...report.run_record import Curve
from .results import ConfidenceInterval, Result, ScoreboardRow

STYLE = """
:root { --paper: #ffffff; --ink: #1d1c1a; --quiet: #66625c; --line: #e3dfd8; --accent: #a8481c;
  --run-1: #0b6bb5; --run-2: #c4521a; --run-3: #1b8a5a; --run-4: #9b3fb0; --run-5: #8a6d00; --run-6: #4a5568; }
@media (prefers-color-scheme: dark) {
  :root { --paper: #17181b; --ink: #ecebe8; --quiet: #a5a19a; --line: #35343a; --accent: #ff9d6b;
    --run-1: #6cb6ff; --run-2: #ff9d6b; --run-3: #5fd39a; --run-4: #d79bea; --run-5: #e3c04d; --run-6: #a9b4c5; }
}
.run-1 { --c: var(--run-1); } .run-2 { --c: var(--run-2); } .run-3 { --c: var(--run-3); }
.run-4 { --c: var(--run-4); } .run-5 { --c: var(--run-5); } .run-6 { --c: var(--run-6); }
.paper { fill: var(--paper); stroke: var(--line); }
text { font: 12px system-ui, -apple-system, "Segoe UI", Roboto, "Noto Sans", sans-serif; fill: var(--quiet); }
.name { fill: var(--ink); } .title { fill: var(--ink); font-size: 15px; font-weight: 600; }
.family { fill: var(--ink); font-weight: 600; } .number { fill: var(--ink); font-variant-numeric: tabular-nums; }
.rule { stroke: var(--line); } .base { stroke: var(--quiet); }
.way { stroke: var(--c); stroke-width: 3; opacity: 0.55; } .whisker { stroke: var(--c); stroke-width: 1.5; }
.after, circle { fill: var(--c); }
.before { fill: var(--paper); stroke: var(--quiet); stroke-width: 1.5; }
.control { fill: var(--paper); stroke: var(--quiet); stroke-width: 1.5; } .doubt { stroke: var(--quiet); }
.aim { stroke: var(--accent); stroke-width: 2; }
polyline { fill: none; stroke: var(--c); stroke-width: 2; stroke-linejoin: round; stroke-linecap: round; }
polyline.faint { stroke-width: 1; opacity: 0.3; } polyline.dashed { stroke-dasharray: 6 4; }
svg svg polyline.run-2 { stroke: var(--quiet); stroke-dasharray: 5 3; } svg svg .faint.run-2 { stroke-dasharray: none; }
svg svg circle.run-2 { fill: var(--quiet); }
"""
WIDTH, PADDING = 880, 18
CHARACTER_WIDTH, LINE_HEIGHT = 6.2, 14.0  # pixels
ChartLabel = tuple[float, float, str, str]  # x, y, text and anchor
LEFT, RIGHT = 282, 680  # of the plot in the overview
ROW_HEIGHT, HEADING_HEIGHT = 30, 28
UNIT_AXIS = Axis(0.0, 1.0, 0.2)
PLOT_BOX = (64.0, 700.0, 372.0, 60.0)  # left, right, bottom and top of the cost chart


def svg_document(height: float, title: str, body: str, width: int = WIDTH) -> str:
    """Return a complete SVG file."""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height:g}" width="{width}" height="{height:g}" '
        f'role="img" aria-labelledby="title"><title id="title">{escape(title)}</title><style>{STYLE}</style>'
        f'<rect class="paper" x="0.5" y="0.5" width="{width - 1}" height="{height - 1:g}" rx="12"/>{body}</svg>\n'
    )


def family_colors(rows: Sequence[ScoreboardRow]) -> dict[str, str]:
    """Return the CSS class with the color of each family."""
    return {family: f"run-{i % 6 + 1}" for i, family in enumerate(dict.fromkeys(row.family for row in rows))}


def svg_text(x: float, y: float, text: str, css_class: str = "", anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" class="{css_class}" text-anchor="{anchor}">{escape(text)}</text>'


def svg_line(css_class: str, x1: float, y1: float, x2: float, y2: float) -> str:
    return f'<line class="{css_class}" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>'


def svg_diamond(x: float, y: float, css_class: str, size: float = 4.5) -> str:
    return f'<path class="{css_class}" d="M{x:.1f} {y - size:.1f}l{size} {size}l-{size} {size}l-{size} -{size}z"/>'


def svg_dot(x: float, y: float, css_class: str, size: float = 4.5) -> str:
    return f'<circle class="{css_class}" cx="{x:.1f}" cy="{y:.1f}" r="{size}"/>'


# Overview


def overview_chart(rows: Sequence[ScoreboardRow], targets: Mapping[str, float]) -> str:
    """Draw every cell from before to after with its interval, and its control. Searches show most candidates only."""
    most_candidates = {
        row.cell: max(each.num_candidates or 0 for each in rows if each.cell == row.cell) for row in rows
    }
    shown = [row for row in rows if row.num_candidates in (None, most_candidates[row.cell])]
    colors = family_colors(rows)
    shown.sort(key=lambda row: list(colors).index(row.family))
    y, parts = 88.0, []
    for family, group in groupby(shown, key=lambda row: row.family):
        before = next(row.before for row in rows if row.family == family)
        parts.append(svg_text(PADDING, y + 18, f"{family}, {before:.2f} before", "family"))
        y += HEADING_HEIGHT
        for row in group:
            parts.append(_overview_row(row, y + ROW_HEIGHT / 2, colors[family], targets.get(row.cell)))
            y += ROW_HEIGHT
    grid = []
    for value in UNIT_AXIS.ticks:
        x = UNIT_AXIS.position(value, LEFT, RIGHT)
        grid += [svg_line("rule", x, 84, x, y + 4), svg_text(x, y + 20, f"{value:.1f}", anchor="middle")]
    title = "Scores on held-out prompts, before and after, by a detector that was never a reward"
    body = svg_text(PADDING, 32, title, "title") + _overview_legend() + "".join(grid + parts)
    return svg_document(y + 36, title, body)


def _overview_row(row: ScoreboardRow, y: float, color: str, target: float | None) -> str:
    before, after = (UNIT_AXIS.position(value, LEFT, RIGHT) for value in (row.before, row.after.mean))
    parts = [svg_text(PADDING, y + 4, _row_label(row), "name"), svg_line(f"way {color}", before, y, after, y)]
    if target:
        x = UNIT_AXIS.position(target, LEFT, RIGHT)
        parts.append(svg_line("aim", x, y - 9, x, y + 9))
    if row.control_change:
        change = row.control_change
        control = ConfidenceInterval(*(row.before + value for value in (change.mean, change.low, change.high)))
        x = UNIT_AXIS.position(control.mean, LEFT, RIGHT)
        parts += [_whisker(control, y + 9, "doubt"), svg_diamond(x, y + 9, "control")]
    parts += [_whisker(row.after, y, f"whisker {color}"), svg_dot(before, y, "before", 4)]
    parts.append(f'<g class="{color}">{svg_dot(after, y, "after", 5.5)}</g>')
    parts.append(svg_text(RIGHT + 22, y + 4, f"{row.after.mean:.3f}  {row.change.mean:+.3f}", "number"))
    seeds = f"{row.seeds} seed{'s' if row.seeds > 1 else ''}"
    parts.append(svg_text(WIDTH - PADDING, y + 4, seeds, anchor="end"))
    return "".join(parts)


def _row_label(row: ScoreboardRow) -> str:
    method = f"{row.objective.removesuffix(' n')} {row.num_candidates}" if row.num_candidates else row.objective
    return f"{method}, {row.reward}"


def _whisker(interval: ConfidenceInterval, y: float, css_class: str) -> str:
    bounds = (min(max(value, 0.0), 1.0) for value in (interval.low, interval.high))
    low, high = (UNIT_AXIS.position(value, LEFT, RIGHT) for value in bounds)
    ends = "".join(svg_line(css_class, x, y - 3, x, y + 3) for x in (low, high))
    return svg_line(css_class, low, y, high, y) + ends


def _overview_legend() -> str:
    x, y = PADDING, 58.0
    return "".join(
        [
            svg_dot(x + 6, y - 4, "before", 4),
            svg_text(x + 18, y, "before"),
            f'<g class="run-1">{svg_dot(x + 86, y - 4, "after", 5.5)}</g>',
            svg_text(x + 98, y, "after, 95 % interval"),
            svg_diamond(x + 238, y - 4, "control"),
            svg_text(x + 250, y, "control: the same with shuffled rewards"),
            svg_line("aim", x + 512, y - 12, x + 512, y + 3),
            svg_text(x + 522, y, "target, set before measuring"),
        ]
    )


# Score against network calls


def cost_chart(
    rows: Sequence[ScoreboardRow],
    title: str = "Score against network calls: search before and after training, and training alone",
) -> str:
    """Draw the scores of searches against network calls per sample, beside the best trained model of each family."""
    searches = [row for row in rows if row.is_search]
    trained = [row for row in rows if not row.is_search and row.family in {search.family for search in searches}]
    best = {row.family: row for row in sorted(trained, key=lambda row: row.after.mean)}
    points = [*searches, *best.values()]
    calls = [math.log2(row.network_calls) for row in points]
    x_axis = Axis(min(calls) - 0.3, max(calls) + 0.3, 1)
    scores = [value for row in points for value in (row.after.low, row.after.high)]
    y_axis, colors = nice_axis(min(scores), max(scores)), family_colors(rows)
    parts = [_cost_grid(x_axis, y_axis)]
    labels: list[ChartLabel] = []
    for _, group in groupby(searches, key=lambda row: row.cell):
        curve, label = _cost_curve(list(group), colors, x_axis, y_axis)
        parts.append(curve)
        labels.append(label)
    parts += [svg_text(x, y, text, "name", anchor) for x, y, text, anchor in spread_labels(labels)]
    for row in best.values():
        x, y = _cost_position(row, x_axis, y_axis)
        parts.append(f'<g class="{colors[row.family]}">{svg_diamond(x, y, "after", 6)}</g>')
        parts.append(svg_text(x + 10, y + 4, f"{row.objective}, {row.family}, trained", "name"))
    return svg_document(420, title, svg_text(PADDING, 32, title, "title") + "".join(parts))


def _cost_position(row: ScoreboardRow, x_axis: Axis, y_axis: Axis) -> tuple[float, float]:
    left, right, bottom, top = PLOT_BOX
    x = x_axis.position(math.log2(row.network_calls), left, right)
    return x, y_axis.position(row.after.mean, bottom, top)


def _cost_curve(
    rows: Sequence[ScoreboardRow], colors: Mapping[str, str], x_axis: Axis, y_axis: Axis
) -> tuple[str, ChartLabel]:
    """Draw the scores of one search by number of candidates. Its label is returned, to be placed later."""
    first, color = rows[0], colors[rows[0].family]
    _, _, bottom, top = PLOT_BOX
    positions = [(*_cost_position(row, x_axis, y_axis), row) for row in rows]
    dashed = " dashed" if first.objective != "best of n" else ""
    points = " ".join(f"{x:.1f},{y:.1f}" for x, y, _ in positions)
    parts = [f'<polyline class="{color}{dashed}" points="{points}"/>']
    for x, y, row in positions:
        low, high = (y_axis.position(value, bottom, top) for value in (row.after.low, row.after.high))
        parts.append(f'<g class="{color}">{svg_line("whisker", x, low, x, high)}{svg_dot(x, y, "", 3.5)}</g>')
        parts.append(svg_text(x + 5, y - 6, str(row.num_candidates)))
    x, y, _ = positions[-1]
    # The curve of the cheaper search ends further left, so its label goes above the end and the other's beside it.
    label_x, label_y, anchor = (x, y - 26, "middle") if dashed else (x + 10, y + 16, "start")
    return "".join(parts), (label_x, label_y, f"{first.objective}, {first.family}", anchor)


def _cost_grid(x_axis: Axis, y_axis: Axis) -> str:
    left, right, bottom, top = PLOT_BOX
    parts = [svg_text((left + right) / 2, bottom + 36, "network calls per sample", anchor="middle")]
    for value in y_axis.ticks:
        y = y_axis.position(value, bottom, top)
        parts += [svg_line("rule", left, y, right, y), svg_text(left - 8, y + 4, y_axis.label(value), anchor="end")]
    for value in x_axis.ticks:
        x = x_axis.position(value, left, right)
        parts += [svg_line("rule", x, bottom, x, top), svg_text(x, bottom + 18, f"{2**value:g}", anchor="middle")]
    return "".join([*parts, svg_line("base", left, bottom, right, bottom)])


def spread_labels(labels: Sequence[ChartLabel]) -> list[ChartLabel]:
    """Move labels up, from the lowest on, until none overlaps another."""
    placed: list[ChartLabel] = []
    for x, y, text, anchor in sorted(labels, key=lambda label: -label[1]):
        while any(
            abs(y - other[1]) < LINE_HEIGHT and _overlap_horizontally((x, y, text, anchor), other) for other in placed
        ):
            y -= 1
        placed.append((x, y, text, anchor))
    return placed


def _overlap_horizontally(first: ChartLabel, second: ChartLabel) -> bool:
    (left, right), (other_left, other_right) = _label_extent(first), _label_extent(second)
    return left < other_right and other_left < right


def _label_extent(label: ChartLabel) -> tuple[float, float]:
    x, _, text, anchor = label
    width = CHARACTER_WIDTH * len(text)
    left = x if anchor == "start" else x - width / 2
    return left, left + width


# Training rewards


def curve_charts(rows: Sequence[ScoreboardRow], results: Sequence[Result], columns: int = 3) -> str:
    """Draw the training reward of every cell and of its control, as means over seeds."""
    trained = [row for row in rows if row.samples]
    width, height = (WIDTH - 2 * PADDING) / columns, 190.0
    parts = []
    for i, row in enumerate(trained):
        x, y = PADDING + i % columns * width, 62 + i // columns * height
        curves = [(kind, mean_curve(results, row.cell, kind)) for kind in ("after", "control")]
        curves = [("trained" if kind == "after" else "shuffled", curve) for kind, curve in curves if curve]
        if curves:
            chart = draw_chart(_row_label(row), curves, f"c-{row.cell}")
            size = f'x="{x:.0f}" y="{y + 16:.0f}" width="{width - 12:.0f}" height="{height - 34:.0f}" '
            parts.append(svg_text(x + 4, y + 8, f"{_row_label(row)}, {row.family}", "name"))
            parts.append(chart.replace("<svg ", f"<svg {size}", 1))
    title = "Training reward by step, mean over seeds; dashed: the control with shuffled rewards"
    total_height = 62 + math.ceil(max(len(trained), 1) / columns) * height + 6
    return svg_document(total_height, title, svg_text(PADDING, 32, title, "title") + "".join(parts))


def mean_curve(results: Sequence[Result], cell: str, kind: str) -> Curve:
    """Return the mean reward over seeds, at the steps that all seeds have."""
    trained = [r for r in results if r["cell"] == cell and r["kind"] == kind and r.get("training")]
    curves = [dict(map(tuple, curve)) for r in trained if (curve := r["training"]["curves"]["reward/mean"])]
    steps = [step for step in (curves[0] if curves else ()) if all(step in curve for curve in curves)]
    return [(int(step), fmean(curve[step] for curve in curves)) for step in steps]
