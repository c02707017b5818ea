"""The scoreboard as SVG: it carries its own paper, so it can be read on light and dark pages alike."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from itertools import groupby
from statistics import fmean

from ...report.charts import Axis, draw_chart, nice_axis
from ...report.run_record import Curve
from .aggregate import ConfidenceInterval, ScoreboardRow
from .results import Result

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
WIDTH, PAD = 880, 18
WIDE, HIGH = 6.2, 14.0  # of a letter, and of a line
ChartLabel = tuple[float, float, str, str]  # where it stands, its words and its anchor
LEFT, RIGHT = 282, 680  # of the plot of the overview
ROW, HEAD = 30, 28
UNIT = Axis(0.0, 1.0, 0.2)


def svg_document(height: float, title: str, body: str, width: int = WIDTH) -> str:
    """A whole file."""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height:g}" width="{width}" height="{height:g}" '
        f'role="img" aria-labelledby="title"><title id="title">{escape(title)}</title><style>{STYLE}</style>'
        f'<rect class="paper" x="0.5" y="0.5" width="{width - 1}" height="{height - 1:g}" rx="12"/>{body}</svg>\n'
    )


def family_colors(lines: Sequence[ScoreboardRow]) -> dict[str, str]:
    """A colour for each family."""
    return {family: f"run-{i % 6 + 1}" for i, family in enumerate(dict.fromkeys(line.family for line in lines))}


def svg_text(x: float, y: float, words: str, kind: str = "", anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" class="{kind}" text-anchor="{anchor}">{escape(words)}</text>'


def svg_line(kind: str, x1: float, y1: float, x2: float, y2: float) -> str:
    return f'<line class="{kind}" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>'


def svg_diamond(x: float, y: float, kind: str, size: float = 4.5) -> str:
    return f'<path class="{kind}" d="M{x:.1f} {y - size:.1f}l{size} {size}l-{size} {size}l-{size} -{size}z"/>'


def svg_dot(x: float, y: float, kind: str, size: float = 4.5) -> str:
    return f'<circle class="{kind}" cx="{x:.1f}" cy="{y:.1f}" r="{size}"/>'


def overview_chart(lines: Sequence[ScoreboardRow], aims: Mapping[str, float]) -> str:
    """Every cell from before to after with its interval, and where its control went."""
    shown = [line for line in lines if line.n in (None, max(o.n or 0 for o in lines if o.cell == line.cell))]
    shown.sort(key=lambda line: list(family_colors(lines)).index(line.family))
    y, parts = 88.0, []
    for family, group in groupby(shown, key=lambda line: line.family):
        parts.append(svg_text(PAD, y + 18, f"{family}, {_family_baseline(family, lines)}", "family"))
        y += HEAD
        for line in group:
            parts.append(_row(line, y + ROW / 2, family_colors(lines)[family], aims.get(line.cell)))
            y += ROW
    grid = []
    for value in UNIT.ticks:
        x = UNIT.place(value, LEFT, RIGHT)
        grid += [svg_line("rule", x, 84, x, y + 4), svg_text(x, y + 20, f"{value:.1f}", anchor="middle")]
    title = "Scores on held-out prompts, before and after, by a detector that was never a reward"
    return svg_document(y + 36, title, svg_text(PAD, 32, title, "title") + _legend() + "".join(grid + parts))


def _family_baseline(family: str, lines: Sequence[ScoreboardRow]) -> str:
    first = next(line for line in lines if line.family == family)
    return f"{first.before:.2f} before"


def _row(line: ScoreboardRow, y: float, color: str, aim: float | None) -> str:
    before, after = (UNIT.place(value, LEFT, RIGHT) for value in (line.before, line.after.mean))
    parts = [svg_text(PAD, y + 4, _row_label(line), "name"), svg_line(f"way {color}", before, y, after, y)]
    if aim:
        place = UNIT.place(aim, LEFT, RIGHT)
        parts.append(svg_line("aim", place, y - 9, place, y + 9))
    if line.control:
        shifted = ConfidenceInterval(
            *(line.before + value for value in (line.control.mean, line.control.low, line.control.high))
        )
        parts += [
            _whisker(shifted, y + 9, "doubt"),
            svg_diamond(UNIT.place(shifted.mean, LEFT, RIGHT), y + 9, "control"),
        ]
    parts += [_whisker(line.after, y, f"whisker {color}"), svg_dot(before, y, "before", 4)]
    parts.append(f'<g class="{color}">{svg_dot(after, y, "after", 5.5)}</g>')
    numbers = f"{line.after.mean:.3f}  {line.change.mean:+.3f}"
    return "".join(
        [
            *parts,
            svg_text(RIGHT + 22, y + 4, numbers, "number"),
            svg_text(WIDTH - PAD, y + 4, _seeds(line), anchor="end"),
        ]
    )


def _row_label(line: ScoreboardRow) -> str:
    method = f"{line.objective.removesuffix(' n')} {line.n}" if line.n else line.objective
    return f"{method}, {line.reward}"


def _seeds(line: ScoreboardRow) -> str:
    return f"{line.seeds} seed{'s' if line.seeds > 1 else ''}"


def _whisker(found: ConfidenceInterval, y: float, kind: str) -> str:
    low, high = (UNIT.place(min(max(value, 0.0), 1.0), LEFT, RIGHT) for value in (found.low, found.high))
    return svg_line(kind, low, y, high, y) + "".join(svg_line(kind, x, y - 3, x, y + 3) for x in (low, high))


def _legend() -> str:
    y, parts = 58.0, []
    parts += [svg_dot(PAD + 6, y - 4, "before", 4), svg_text(PAD + 18, y, "before")]
    parts += [
        f'<g class="run-1">{svg_dot(PAD + 86, y - 4, "after", 5.5)}</g>',
        svg_text(PAD + 98, y, "after, 95 % interval"),
    ]
    parts += [
        svg_diamond(PAD + 238, y - 4, "control"),
        svg_text(PAD + 250, y, "control: the same with shuffled rewards"),
    ]
    parts += [
        svg_line("aim", PAD + 512, y - 12, PAD + 512, y + 3),
        svg_text(PAD + 522, y, "aim, stated before measuring"),
    ]
    return "".join(parts)


def cost_chart(
    lines: Sequence[ScoreboardRow],
    title: str = "Score against price: searches, before and after training, and training alone",
) -> str:
    """What a search's score costs in network calls a picture, beside what training reaches at the price of one."""
    searches = [line for line in lines if line.searched]
    trained = [line for line in lines if not line.searched and line.family in {s.family for s in searches}]
    best = {t.family: t for t in sorted(trained, key=lambda t: t.after.mean)}
    points = [*searches, *best.values()]
    across = Axis(math.log2(min(p.price for p in points)) - 0.3, math.log2(max(p.price for p in points)) + 0.3, 1)
    scores = [value for p in points for value in (p.after.low, p.after.high)]
    up, box = nice_axis(min(scores), max(scores)), (64.0, 700.0, 372.0, 60.0)
    parts = [_grid(across, up, box)]
    names: list[ChartLabel] = []
    for _, group in groupby(searches, key=lambda line: line.cell):
        drawn, name = _cost_curve(list(group), family_colors(lines), across, up, box)
        parts, names = [*parts, drawn], [*names, name]
    parts += [svg_text(x, y, words, "name", anchor) for x, y, words, anchor in spread_labels(names)]
    for line in best.values():
        x, y = across.place(math.log2(line.price), *box[:2]), up.place(line.after.mean, *box[2:])
        parts.append(f'<g class="{family_colors(lines)[line.family]}">{svg_diamond(x, y, "after", 6)}</g>')
        parts.append(svg_text(x + 10, y + 4, f"{line.objective}, {line.family}, trained", "name"))
    return svg_document(420, title, svg_text(PAD, 32, title, "title") + "".join(parts))


def spread_labels(names: Sequence[ChartLabel]) -> list[ChartLabel]:
    """From the lowest up, each above those whose place it would take."""
    placed: list[ChartLabel] = []
    for x, y, words, anchor in sorted(names, key=lambda name: -name[1]):
        while any(abs(y - other[1]) < HIGH and _labels_overlap((x, y, words, anchor), other) for other in placed):
            y -= 1
        placed.append((x, y, words, anchor))
    return placed


def _labels_overlap(one: ChartLabel, other: ChartLabel) -> bool:
    (left, right), (low, high) = _label_extent(one), _label_extent(other)
    return left < high and low < right


def _label_extent(name: ChartLabel) -> tuple[float, float]:
    x, _, words, anchor = name
    left = x if anchor == "start" else x - WIDE * len(words) / 2
    return left, left + WIDE * len(words)


def _cost_curve(
    line: Sequence[ScoreboardRow], tints: Mapping[str, str], across: Axis, up: Axis, box: tuple[float, ...]
) -> tuple[str, ChartLabel]:
    """A search's scores, and its name, which is drawn last."""
    first, color = line[0], tints[line[0].family]
    places = [(across.place(math.log2(p.price), *box[:2]), up.place(p.after.mean, *box[2:]), p) for p in line]
    dashed = " dashed" if first.objective != "best of n" else ""
    joined = " ".join(f"{x:.1f},{y:.1f}" for x, y, _ in places)
    parts = [f'<polyline class="{color}{dashed}" points="{joined}"/>']
    for x, y, p in places:
        low, high = (up.place(value, *box[2:]) for value in (p.after.low, p.after.high))
        parts.append(f'<g class="{color}">{svg_line("whisker", x, low, x, high)}{svg_dot(x, y, "", 3.5)}</g>')
        parts.append(svg_text(x + 5, y - 6, str(p.n)))
    x, y, _ = places[-1]
    # The cheaper of two searches ends to the left of the other: its name goes above its end, the other's beside it.
    at, high, anchor = (x + 10, y + 16, "start") if not dashed else (x, y - 26, "middle")
    return "".join(parts), (at, high, f"{first.objective}, {first.family}", anchor)


def _grid(across: Axis, up: Axis, box: tuple[float, ...]) -> str:
    left, right, bottom, top = box
    parts = [svg_text((left + right) / 2, bottom + 36, "network calls a picture", anchor="middle")]
    for value in up.ticks:
        y = up.place(value, bottom, top)
        parts += [svg_line("rule", left, y, right, y), svg_text(left - 8, y + 4, up.label(value), anchor="end")]
    for value in across.ticks:
        x = across.place(value, left, right)
        parts += [svg_line("rule", x, bottom, x, top), svg_text(x, bottom + 18, f"{2**value:g}", anchor="middle")]
    return "".join([*parts, svg_line("base", left, bottom, right, bottom)])


def curve_charts(lines: Sequence[ScoreboardRow], results: Sequence[Result], columns: int = 3) -> str:
    """The training reward of every cell, mean over seeds, and of its control."""
    shown = [line for line in lines if line.samples]
    wide, high = (WIDTH - 2 * PAD) / columns, 190.0
    parts = []
    for place, line in enumerate(shown):
        x, y = PAD + place % columns * wide, 62 + place // columns * high
        drawn = [(kind, mean_curve(results, line.cell, kind)) for kind in ("after", "control")]
        drawn = [("trained" if kind == "after" else "shuffled", curve) for kind, curve in drawn if curve]
        if drawn:
            inner = draw_chart(_row_label(line), drawn, f"c-{line.cell}")
            size = f'x="{x:.0f}" y="{y + 16:.0f}" width="{wide - 12:.0f}" height="{high - 34:.0f}" '
            parts += [svg_text(x + 4, y + 8, f"{_row_label(line)}, {line.family}", "name")]
            parts.append(inner.replace("<svg ", f"<svg {size}", 1))
    title = "Training reward by step, mean over seeds; dashed: the control, paid for what others did"
    height = 62 + math.ceil(max(len(shown), 1) / columns) * high + 6
    return svg_document(height, title, svg_text(PAD, 32, title, "title") + "".join(parts))


def mean_curve(results: Sequence[Result], cell: str, kind: str) -> Curve:
    """At each step that all seeds have."""
    trained = [r for r in results if r["cell"] == cell and r["kind"] == kind and r.get("training")]
    seeds = [result["training"]["curves"]["reward"] for result in trained]
    known = [dict(map(tuple, seed)) for seed in seeds if seed]
    steps = [step for step in (known[0] if known else ()) if all(step in other for other in known)]
    return [(int(step), fmean(seed[step] for seed in known)) for step in steps]
