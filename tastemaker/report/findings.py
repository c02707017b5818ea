"""Findings of the report: what the numbers of a run mean, in sentences."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean, median
from typing import Literal

from ..training.drift_statistics import MetricChange, compare_measurements
from .run_record import Curve, RunRecord

NUM_STANDARD_ERRORS = 4.0  # minimal size of a change that is reported
MIN_TREND_STEPS = 10  # shorter curves have no trend
TREND_VALUES = "The values are medians of the first and the last fifth of the steps."


@dataclass(frozen=True)
class ReportFinding:
    kind: Literal["warning", "note", "good"]
    text: str


@dataclass(frozen=True)
class Trend:
    """Medians of the first and the last fifth of a curve, with the standard error of their difference."""

    before: float
    after: float
    error: float

    @property
    def rose(self) -> bool:
        return self.after - self.before > NUM_STANDARD_ERRORS * self.error

    @property
    def fell(self) -> bool:
        return self.before - self.after > NUM_STANDARD_ERRORS * self.error

    def __str__(self) -> str:
        return f"from {self.before:.3g} to {self.after:.3g}"


def fit_trend(curve: Curve) -> Trend | None:
    """Return the trend of a curve, or None if the curve is too short."""
    if len(curve) < MIN_TREND_STEPS:
        return None
    values = [value for _, value in curve]
    size = len(values) // 5
    jumps = [abs(b - a) for a, b in pairwise(values)]
    # Median absolute difference of neighbors, scaled to the standard deviation of normal noise. A trend hardly
    # changes it.
    noise = 1.4826 * median(jumps) / math.sqrt(2)
    # The standard error of a median is 1.25 times that of a mean, and the difference has two medians.
    return Trend(median(values[:size]), median(values[-size:]), noise * 1.25 * math.sqrt(2 / size))


def reward_change(record: RunRecord) -> MetricChange | Trend | None:
    """Return how the training reward changed: on the guard's fixed prompts if measured, otherwise along the curve.

    The guard compares the same prompts, so its comparison is more sensitive than the curve, whose
    steps have different prompts and whose first steps have already learned.
    """
    trend = fit_trend(record.curve("reward/mean"))
    measurements = record.guard_measurements
    if len(measurements) < 2:
        return trend
    paired = compare_measurements(
        "reward/mean", measurements[:1], measurements[-2:] if len(measurements) > 2 else measurements[-1:]
    )
    return trend if trend and trend.rose and not paired.rose else paired


def collect_findings(record: RunRecord) -> list[ReportFinding]:
    """Return warnings first, then notes. Every run has at least one finding if it has a reward."""
    num_checks = sum("guard/reward/mean" in row for row in record.rows)
    findings = [*_hacking_findings(record, num_checks), *_learning_findings(record)]
    if not findings and record.curve("reward/mean"):
        findings.append(_healthy_finding(record, num_checks))
    if num_checks and not record.held_out:
        text = "No reward is held out, so the guard checked diversity only. Add a second reward with weight 0."
        findings.append(ReportFinding("note", text))
    findings += _reconstruction_findings(record)
    if record.best_checkpoint:
        text = f"The best checkpoint by held-out score is {record.best_checkpoint} (checkpoints/best)."
        findings.append(ReportFinding("note", text))
    return findings


def _reconstruction_findings(record: RunRecord) -> list[ReportFinding]:
    """Return the final reconstruction metrics of an autoencoder, and which metrics could not be computed."""
    if not record.reconstruction:
        return []
    metrics = {
        name: value
        for name, value in record.reconstruction.items()
        if name != "images" and isinstance(value, int | float)
    }
    numbers = ", ".join(f"{name} {value:.4g}" for name, value in metrics.items())
    count, missing = record.reconstruction.get("images", "Some"), record.reconstruction.get("missing", ())
    text = f"{count} held-out images were reconstructed with {numbers}."
    return [ReportFinding("note", text), *(ReportFinding("note", f"{sentence}.") for sentence in missing)]


def _hacking_findings(record: RunRecord, num_checks: int) -> list[ReportFinding]:
    """Return the guard's last warning, or signs of reward hacking in the curves if there was no guard."""
    warnings = [(row["step"], str(row["warning"])) for row in record.rows if row.get("warning")]
    if warnings:
        step, text = warnings[-1]
        is_current = step == max(row["step"] for row in record.rows if "guard/reward/mean" in row)
        when = f"At step {step}" if is_current else f"At step {step}, but not at the last check"
        text = text.replace(" -> ", " \N{RIGHTWARDS ARROW} ")
        return [ReportFinding("warning" if is_current else "note", f"{when}, {text}.")]
    reward = fit_trend(record.curve("reward/mean"))
    if num_checks or reward is None or not reward.rose:
        return []
    trends = {name: fit_trend(record.curve(f"rewards/{name}")) for name in record.held_out}
    falls = [f"the held-out reward '{name}' fell {trend}" for name, trend in trends.items() if trend and trend.fell]
    if not falls:
        return []
    text = f"Probable reward hacking: the training reward rose {reward}, while {' and '.join(falls)}. {TREND_VALUES}"
    return [ReportFinding("warning", text)]


def _learning_findings(record: RunRecord) -> list[ReportFinding]:
    """Return signs that a run does not learn, although its metrics look healthy."""
    norms = [value for _, value in record.curve("grad_norm")]
    zero_std_groups = [value for _, value in record.curve("zero_std_groups")]
    num_zero = sum(norm == 0 for norm in norms)
    findings = []
    if norms and num_zero > len(norms) / 10:
        text = (
            f"No gradient reached the weights in {num_zero} of {len(norms)} steps. Run `tastemaker doctor` to see why."
        )
        findings.append(ReportFinding("warning", text))
    if zero_std_groups and fmean(zero_std_groups) > 0.8:
        text = (
            f"In {fmean(zero_std_groups):.0%} of the groups all samples have the same reward, so they give no "
            "gradient. Use a finer reward, or prompts that are neither too easy nor too hard."
        )
        findings.append(ReportFinding("warning", text))
    change = reward_change(record)
    if change is not None and not change.rose:
        text = "fell" if change.fell else "did not rise beyond its noise"
        values = f" {TREND_VALUES}" if isinstance(change, Trend) else ""
        findings.append(ReportFinding("note", f"The training reward {text} ({change}).{values}"))
    return findings


def _healthy_finding(record: RunRecord, num_checks: int) -> ReportFinding:
    if not num_checks:
        return ReportFinding(
            "note",
            "The guard was off, so only the training reward was measured. Set guard.every to detect reward hacking.",
        )
    watched = " and ".join([*(f"the held-out reward '{name}'" for name in record.held_out), "diversity"])
    text = f"No sign of reward hacking in {num_checks} checks: {watched} did not fall beyond noise."
    # Diversity alone cannot show that the model improved.
    return ReportFinding("good" if record.held_out else "note", text)
