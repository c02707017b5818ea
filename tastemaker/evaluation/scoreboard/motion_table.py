"""The scoreboard's table of video motion: a frozen video may earn as much reward as a moving one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import fmean

from .markdown_tables import format_change, format_count, format_table
from .results import Result

MOTION_METRICS = {"motion": "motion", "frames": "frames apart", "flicker": "flicker", "diversity": "diversity"}


def format_motion_table(results: Sequence[Result]) -> str | None:
    """Cells whose guard saw motion: rewards at equal samples and at equal time, and how the clips move."""
    own = [r for r in results if r["kind"] == "after" and "motion" in (r.get("training") or {}).get("guard", {})]
    if not own:
        return None
    cells = {cell: [r for r in own if r["cell"] == cell] for cell in dict.fromkeys(r["cell"] for r in own)}
    shortest = min(_seconds(each) for each in cells.values())
    head = ["method", "reward", "samples", "seconds", "training reward", f"after {shortest:.0f} s", "each reward"]
    rows = []
    for each in cells.values():
        told, first = [r["training"] for r in each], each[0]["about"]
        parts = [name for name in told[0]["guard"] if name.startswith("reward/")]
        rows.append(
            [
                *(first["objective"], first["reward"], format_count(fmean(t["samples"] for t in told))),
                *(f"{_seconds(each):.0f}", format_change(_ends(told, "reward"), 3), f"{_reached(each, shortest):.3g}"),
                ", ".join(f"{name.removeprefix('reward/')} {format_change(_ends(told, name), 3)}" for name in parts)
                or "-",
                *(format_change(_ends(told, name), 3) for name in MOTION_METRICS),
            ]
        )
    return format_table([*head, *MOTION_METRICS.values()], rows)


def _seconds(each: Sequence[Result]) -> float:
    return fmean(r["training"]["seconds"] for r in each)


def _ends(told: Iterable[dict[str, dict[str, list[float]]]], name: str) -> tuple[float, float] | None:
    found = [t["guard"][name] for t in told if t["guard"].get(name)]
    return (fmean(e[0] for e in found), fmean(e[1] for e in found)) if found else None


def _reached(each: Sequence[Result], seconds: float) -> float:
    """The reward on the guard's prompts after so many seconds, steps taken to be equally long."""
    found = []
    for told in (r["training"] for r in each):
        step, curve = told["steps"] * min(1.0, seconds / max(told["seconds"], 1e-9)), told["curves"]["guard/reward"]
        found.append(max((point for point in curve if point[0] <= step), key=lambda p: p[0], default=curve[0])[1])
    return fmean(found)
