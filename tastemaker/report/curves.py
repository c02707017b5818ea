"""Which curves a page shows, in which order, and what each is called."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from .charts import draw_chart, format_number, smooth_curve
from .run_record import Curve, RunRecord

METRIC_TITLES = {
    "reward": ("training reward", "what the run learns from"),
    "kl": ("KL to the reference", "how far the weights have moved what they make"),
    "grad_norm": ("gradient norm", ""),
    "loss": ("loss", ""),
    "guard/reward": ("training reward, fixed prompts", "always the same prompts and noise"),
    "guard/diversity": ("diversity within prompts", "distance between samples of one prompt; low is all alike"),
    "guard/variety": ("variety between prompts", "distance between samples of different prompts"),
    "guard/entropy": ("entropy", "of brightness, in bits; low is blank"),
    "guard/edges": ("edges", "share of pixels where brightness jumps"),
    "guard/saturation": ("saturation", ""),
    "guard/motion": ("motion", "of clips, in hundredths of a side from frame to frame; 0 is frozen"),
    "guard/frames": ("frames apart", "how much the frames of a clip differ"),
    "guard/flicker": ("flicker", "of clips; 0 is steady"),
    "guard/dark": ("dark pixels", "share of them"),
}
MAIN_METRICS = ("reward", "kl", "grad_norm", "loss")


def render_curves(records: Sequence[RunRecord]) -> str:
    """Rewards and optimisation, then what the guard watched, then the rest behind a click."""
    every = list(dict.fromkeys(name for record in records for name in record.metrics()))
    parts = [name for name in every if name.startswith("reward/")]
    # One that is all of the reward would be drawn twice.
    apart = [name for name in parts if any(record.curve(name) != record.curve("reward") for record in records)]
    main = [name for name in (MAIN_METRICS[0], *apart, *MAIN_METRICS[1:]) if name in every]
    guarded = [name for name in every if name.startswith("guard/")]
    held = {f"guard/reward/{name}" for record in records for name in record.held_out}
    guarded = sorted(
        guarded, key=lambda name: (name not in held, list(METRIC_TITLES).index(name) if name in METRIC_TITLES else 0)
    )
    rest = [name for name in every if name not in {*main, *parts, *guarded}]
    shown = _cards(records, main)
    if guarded:
        words = "The guard's looks at fixed prompts from fixed noise, beside what the run is rewarded for."
        shown += f'<h3 class="group" id="guard">Guard</h3><p class="quiet">{words}</p>{_cards(records, guarded)}'
    if rest:
        shown += f"<details><summary>{len(rest)} more metrics</summary>{_cards(records, rest)}</details>"
    return shown


def _cards(records: Sequence[RunRecord], metrics: Sequence[str]) -> str:
    return f'<div class="cards">{"".join(_card(records, metric) for metric in metrics)}</div>'


def _card(records: Sequence[RunRecord], metric: str) -> str:
    title, words = _metric_title(records, metric)
    curves = [(record.name, record.curve(metric)) for record in records]
    ends = "".join(_ends(i, curve, len(records)) for i, (_, curve) in enumerate(curves) if curve)
    told = f"<p>{escape(words)}</p>" if words else ""
    identity = "c-" + "".join(mark if mark.isalnum() else "-" for mark in metric)
    return (
        f'<figure class="card curve"><figcaption><h3>{escape(title)}</h3><p class="ends">{ends}</p></figcaption>'
        f"{draw_chart(title, curves, identity)}{told}</figure>"
    )


def _metric_title(records: Sequence[RunRecord], metric: str) -> tuple[str, str]:
    if metric in METRIC_TITLES:
        return METRIC_TITLES[metric]
    name = metric.rpartition("reward/")[2]
    holders = [record.name for record in records if name in record.held_out and record.curve(metric)]
    if "reward/" in metric and holders:
        everywhere = len(holders) == sum(bool(record.curve(metric)) for record in records)
        words = "weight 0: watched, never trained on"
        return (f"{name}, held out", words) if everywhere else (name, f"held out in {', '.join(holders)}")
    if metric.startswith("guard/reward/"):
        return f"{name}, fixed prompts", ""
    return (f"reward: {name}", "") if metric.startswith("reward/") else (metric.replace("_", " "), "")


def _ends(run: int, curve: Curve, runs: int) -> str:
    smoothed = smooth_curve(curve)
    key = f'<span class="key run-{run % 6 + 1}"></span>' if runs > 1 else ""
    return f"<span>{key}{format_number(smoothed[0][1])} &rarr; {format_number(smoothed[-1][1])}</span> "
