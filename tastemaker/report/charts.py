"""Curves as SVG: a small multiple for each metric, all runs in it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from statistics import fmean

from .run_record import Curve

WIDTH, HEIGHT = 340, 190
LEFT, RIGHT, TOP, BOTTOM = 46, 10, 10, 24
POINTS = 240  # drawn at most: more than a small chart has pixels
SMOOTHED = 24  # points from which on a curve is drawn smooth over its faint self


@dataclass(frozen=True)
class Axis:
    """A range with round ticks."""

    low: float
    high: float
    step: float

    @property
    def ticks(self) -> list[float]:
        first = math.ceil(self.low / self.step - 1e-9)
        return [k * self.step for k in range(first, math.floor(self.high / self.step + 1e-9) + 1)]

    def place(self, value: float, start: float, end: float) -> float:
        return start + (value - self.low) / (self.high - self.low) * (end - start)

    def label(self, value: float) -> str:
        if abs(value) >= 10_000:
            return f"{value / 1000:g}k"
        digits = max(0, -math.floor(math.log10(self.step) + 1e-9))
        return f"{value:.0e}" if digits > 4 and value else f"{value:.{min(digits, 4)}f}"


def nice_axis(low: float, high: float, count: int = 4) -> Axis:
    """About so many ticks at multiples of 1, 2 or 5, the range a little wider than the values."""
    if high - low < 1e-9 * max(1.0, abs(high)):
        spread = abs(high) / 2 or 1.0
        low, high = low - spread, high + spread
    rough = (high - low) / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= rough * 0.999)
    margin = (high - low) * 0.06
    return Axis(low - margin, high + margin, step)


def downsample_curve(curve: Curve) -> Curve:
    """At most so many points, each the mean of its neighbourhood."""
    if len(curve) <= POINTS:
        return curve
    size = math.ceil(len(curve) / POINTS)
    pieces = [curve[i : i + size] for i in range(0, len(curve), size)]
    return [(piece[-1][0], fmean(value for _, value in piece)) for piece in pieces]


def smooth_curve(curve: Curve) -> Curve:
    """Running means over about a tenth of the curve; narrow at its start, where learning is fast."""
    reach = max(1, len(curve) // 20)
    values = [value for _, value in curve]
    means = []
    for i in range(len(curve)):
        near = min(reach, i)
        means.append(fmean(values[i - near : i + near + 1]))
    return [(step, mean) for (step, _), mean in zip(curve, means, strict=True)]


def draw_chart(title: str, curves: Sequence[tuple[str, Curve]], identity: str) -> str:
    """One metric of several runs, by run; its title says in words what the lines show."""
    curves = [(name, downsample_curve(curve)) for name, curve in curves]
    points = [point for _, curve in curves for point in curve]
    steps, values = [step for step, _ in points], [value for _, value in points]
    first = 0 if min(steps) <= 0.1 * max(steps) else min(steps)
    across, up = Axis(first, max(max(steps), first + 1), 1), nice_axis(min(values), max(values))
    lines = "".join(_line(i, curve, across, up) for i, (_, curve) in enumerate(curves) if curve)
    told = "; ".join(f"{name}: {describe_change(curve)}" for name, curve in curves if curve)
    return (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-labelledby="{identity}">'
        f'<title id="{identity}">{escape(f"{title}, {told}")}</title>{_frame(across, up)}{lines}</svg>'
    )


def format_number(value: float) -> str:
    """Three digits, and fewer of what is small."""
    return f"{value:.3g}" if abs(value) >= 0.1 else f"{value:.2g}"


def describe_change(curve: Curve) -> str:
    (first, start), (last, end) = smooth_curve(curve)[0], smooth_curve(curve)[-1]
    return f"from {start:.3g} at step {first} to {end:.3g} at step {last}"


def _frame(across: Axis, up: Axis) -> str:
    parts = []
    for value in up.ticks:
        y = up.place(value, HEIGHT - BOTTOM, TOP)
        parts.append(f'<line class="rule" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{up.label(value)}</text>')
    steps = nice_axis(across.low, across.high)
    for value in Axis(across.low, across.high, max(1.0, steps.step)).ticks:
        x = across.place(value, LEFT, WIDTH - RIGHT)
        anchor = "end" if x > WIDTH - RIGHT - 14 else "middle"
        parts.append(f'<text x="{x:.1f}" y="{HEIGHT - 6}" text-anchor="{anchor}">{steps.label(value)}</text>')
    base = HEIGHT - BOTTOM
    return "".join([*parts, f'<line class="base" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{base}" y2="{base}"/>'])


def _line(run: int, curve: Curve, across: Axis, up: Axis) -> str:
    kind = f"run-{run % 6 + 1}"
    if len(curve) == 1:
        ((x, y),) = _places(curve, across, up)
        return f'<circle class="{kind}" cx="{x:.1f}" cy="{y:.1f}" r="3"/>'
    noisy = len(curve) >= SMOOTHED
    faint = f'<polyline class="faint {kind}" points="{_joined(curve, across, up)}"/>' if noisy else ""
    shown = smooth_curve(curve) if noisy else curve
    dots = (
        ""
        if noisy
        else "".join(
            f'<circle class="{kind}" cx="{x:.1f}" cy="{y:.1f}" r="2.2"/>' for x, y in _places(curve, across, up)
        )
    )
    return f'{faint}<polyline class="{kind}" points="{_joined(shown, across, up)}"/>{dots}'


def _places(curve: Curve, across: Axis, up: Axis) -> list[tuple[float, float]]:
    return [(across.place(s, LEFT, WIDTH - RIGHT), up.place(v, HEIGHT - BOTTOM, TOP)) for s, v in curve]


def _joined(curve: Curve, across: Axis, up: Axis) -> str:
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in _places(curve, across, up))
