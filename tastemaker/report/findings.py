"""What a run's numbers say, in words."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean, median
from typing import Literal

from ..training.drift_statistics import MetricChange, compare_measurements
from .run_record import Curve, RunRecord

BEYOND_NOISE = 4.0  # standard errors
MIN_TREND_STEPS = 10  # steps from which on a trend can be told


@dataclass(frozen=True)
class ReportFinding:
    kind: Literal["warning", "note", "good"]
    text: str


@dataclass(frozen=True)
class Trend:
    """Medians of the first and the last fifth of a curve, and what the noise from point to point makes of them."""

    before: float
    after: float
    error: float

    @property
    def rose(self) -> bool:
        return self.after - self.before > BEYOND_NOISE * self.error

    @property
    def fell(self) -> bool:
        return self.before - self.after > BEYOND_NOISE * self.error

    def __str__(self) -> str:
        return f"from {self.before:.3g} to {self.after:.3g}"


def fit_trend(curve: Curve) -> Trend | None:
    if len(curve) < MIN_TREND_STEPS:
        return None
    values = [value for _, value in curve]
    size = len(values) // 5
    jumps = [abs(b - a) for a, b in pairwise(values)]
    noise = 1.4826 * median(jumps) / math.sqrt(2)  # the standard deviation, if it is normal, whatever the trend
    # A median is 1.25 times as uncertain as a mean, and there are two of them.
    return Trend(median(values[:size]), median(values[-size:]), noise * 1.25 * math.sqrt(2 / size))


def reward_change(record: RunRecord) -> MetricChange | Trend | None:
    """What became of the training reward: on the guard's prompts, before and after, or else along the curve.

    The same prompts from the same noise tell more than steps, each of other prompts, of which the first have learned.
    """
    curve = fit_trend(record.curve("reward"))
    if len(record.looks) < 2:
        return curve
    paired = compare_measurements(
        "reward", record.looks[:1], record.looks[-2:] if len(record.looks) > 2 else record.looks[-1:]
    )
    return curve if curve and curve.rose and not paired.rose else paired


def collect_findings(record: RunRecord) -> list[ReportFinding]:
    """Warnings first, then what is worth knowing; never nothing."""
    looks = [row for row in record.rows if "guard/reward" in row]
    found = [*_hacking_findings(record, len(looks)), *_learning_findings(record)]
    if not found and record.curve("reward"):
        found.append(_healthy_finding(record, len(looks)))
    if looks and not record.held_out:
        text = "No reward is held out, so only diversity was watched. Give a second reward weight 0 to see more."
        found.append(ReportFinding("note", text))
    found += _reconstruction_findings(record)
    if record.best:
        found.append(
            ReportFinding("note", f"The best checkpoint by held-out score is {record.best} (checkpoints/best).")
        )
    return found


def _reconstruction_findings(record: RunRecord) -> list[ReportFinding]:
    """How good an autoencoder's copies were in the end, and what nobody could measure."""
    if not record.copies:
        return []
    told = {name: x for name, x in record.copies.items() if name != "pictures" and isinstance(x, int | float)}
    numbers = ", ".join(f"{name} {value:.4g}" for name, value in told.items())
    count, missing = record.copies.get("pictures", "Some"), record.copies.get("missing", ())
    text = f"{count} held-out pictures were copied with {numbers}."
    return [ReportFinding("note", text), *(ReportFinding("note", f"{sentence}.") for sentence in missing)]


def _hacking_findings(record: RunRecord, looks: int) -> list[ReportFinding]:
    told = [(row["step"], str(row["warning"])) for row in record.rows if row.get("warning")]
    if told:
        step, text = told[-1]
        now = step == max(row["step"] for row in record.rows if "guard/reward" in row)
        when = f"At step {step}" if now else f"At step {step}, though no longer at the last look"
        words = text.replace(" -> ", " \N{RIGHTWARDS ARROW} ")
        return [ReportFinding("warning" if now else "note", f"{when}, {words}.")]
    reward = fit_trend(record.curve("reward"))
    if looks or reward is None or not reward.rose:
        return []
    falls = {name: fit_trend(record.curve(f"reward/{name}")) for name in record.held_out}
    lost = [f"the held-out reward '{name}' fell {each}" for name, each in falls.items() if each and each.fell]
    if not lost:
        return []
    text = f"Probable reward hacking: the training reward rose {reward}, while {' and '.join(lost)}."
    return [ReportFinding("warning", text)]


def _learning_findings(record: RunRecord) -> list[ReportFinding]:
    """The failure nobody sees: a run that looks healthy and learns nothing."""
    norms = [value for _, value in record.curve("grad_norm")]
    flat = [value for _, value in record.curve("flat_groups")]
    still = sum(norm == 0 for norm in norms)
    found = []
    if norms and still > len(norms) / 10:
        text = f"No gradient reached the weights in {still} of {len(norms)} steps. `tastemaker doctor` finds out why."
        found.append(ReportFinding("warning", text))
    if flat and fmean(flat) > 0.8:
        text = f"In {fmean(flat):.0%} of the groups all samples earned the same, and such groups teach nothing."
        found.append(ReportFinding("warning", text))
    reward = reward_change(record)
    if reward is not None and not reward.rose:
        text = "fell" if reward.fell else "did not rise beyond its noise"
        found.append(ReportFinding("note", f"The training reward {text} ({reward})."))
    return found


def _healthy_finding(record: RunRecord, looks: int) -> ReportFinding:
    if not looks:
        return ReportFinding("note", "The guard was off, so nothing but the training reward was watched.")
    watched = " or ".join([*(f"the held-out reward '{name}'" for name in record.held_out), "diversity"])
    return ReportFinding("good", f"No sign of reward hacking in {looks} looks: no fall of {watched} beyond noise.")
