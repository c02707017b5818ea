"""Statistics of the guard: its measurements, and the sequential test for reward hacking.

Every measurement uses the same prompts and new noise. Measurements are compared prompt by prompt, and the spread of the
changes between prompts gives the standard error of their mean (a paired t statistic). A change counts if it is
significant, large enough to matter, and lasts. Significance is that of all measurements together: a slow fall adds up
although no single measurement shows it. The thresholds hold for all checks of a run at once, however many there are.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist, fmean
from typing import Any

import numpy as np
from numpy.typing import NDArray

# Probability that a run in which a metric does not change gets a fall of it reported at any of its checks: a fall since
# the start, and a fall since the best window.
FALSE_ALARM_START, FALSE_ALARM_BEST = 0.008, 0.002
# Shape of the boundary of the sequential test: at 2 it is tightest after about 20 checks. It holds for any number.
BOUNDARY_SHAPE = 2.0
# Standard scores of the training reward: to have risen, and to have fallen with another metric, which then was not
# traded for anything. Standard errors of a change between two windows, for reports.
RISE_SCORE, SLIP_SCORE = 3.0, 2.0
RISE_ERRORS, FALL_ERRORS = 3.0, 3.5
# Falls that matter: of a held-out reward in standard deviations of single samples (for a yes/no reward, at most a
# tenth of all samples), of the others as fractions of themselves.
SCORE_FALL, DIVERSITY_FALL, VARIETY_FALL = 0.2, 0.25, 0.1
MIN_ERROR = 1e-12  # of means that are equal but for rounding
COLLAPSED_SHARE = 0.2  # at most this fraction of the diversity is left after a collapse
FROZEN_SHARE = 0.5  # at most this fraction of motion and of frame distance is left when videos freeze
# Of an editor's distance to its source: a rise by half, or a fall to a fifth, if it is as large as SOURCE_CHANGE.
IGNORED_SHARE, COPIED_SHARE, SOURCE_CHANGE = 1.5, 0.2, 0.02
REWARD_PREFIX, SOURCE_DISTANCE = "rewards/", "source_distance"
DRIFT_THRESHOLDS = {"entropy": 1.0, "edges": 0.1, "saturation": 0.1, "dark": 0.1, "flicker": 0.02}  # worth mentioning


@dataclass(frozen=True)
class GuardMeasurement:
    """The metrics of one check: reward/mean, rewards/NAME, diversity, variety and image statistics."""

    step: int
    per_prompt: Mapping[str, list[float]]  # one value per prompt, by metric
    std: Mapping[str, float]  # standard deviation of single samples, by reward

    def mean(self, name: str) -> float:
        return fmean(self.per_prompt[name])

    def means(self) -> dict[str, float]:
        return {name: fmean(values) for name, values in self.per_prompt.items()}


@dataclass(frozen=True)
class MetricChange:
    """The change of a metric between two windows of measurements."""

    since_step: int
    before: float
    after: float
    standard_error: float  # of the difference

    @property
    def rose(self) -> bool:
        return self.after - self.before > RISE_ERRORS * self.standard_error

    @property
    def fell(self) -> bool:
        return self.before - self.after > FALL_ERRORS * self.standard_error

    def __str__(self) -> str:
        return f"from {self.before:.3g} to {self.after:.3g} since step {self.since_step}"


class GuardHistory:
    """All measurements of a run. They are saved in its checkpoints."""

    def __init__(self, held_out: Sequence[str] = (), patience: int = 2) -> None:
        self.held_out, self.patience = tuple(f"{REWARD_PREFIX}{name}" for name in held_out), patience
        self.measurements: list[GuardMeasurement] = []

    def state_dict(self) -> list[dict[str, Any]]:
        return [{"step": each.step, "rows": each.per_prompt, "spread": each.std} for each in self.measurements]

    def load_state_dict(self, state: Sequence[Mapping[str, Any]]) -> None:
        self.measurements = [
            GuardMeasurement(int(each["step"]), dict(each["rows"]), dict(each["spread"])) for each in state
        ]

    def add(self, measurement: GuardMeasurement) -> None:
        """Append a measurement; one with other prompts or metrics starts a new history."""
        if self.measurements and _shape(self.measurements[0]) != _shape(measurement):
            self.measurements.clear()
        self.measurements.append(measurement)

    @property
    def best_step(self) -> int | None:
        """The step with the highest held-out score: the sum of held-out rewards, each over its initial std."""
        names = [name for name in self.held_out if self.measurements and name in self.measurements[0].per_prompt]
        if not names:
            return None
        scales = {name: self.measurements[0].std.get(name) or 1.0 for name in names}
        return max(self.measurements, key=lambda each: sum(each.mean(name) / scales[name] for name in names)).step

    def hacking_warning(self) -> str | None:
        """Return the evidence for reward hacking as a sentence: the reward rose while something else fell."""
        if len(self.measurements) <= self.patience:
            return None
        reward = self._change("reward/mean", self.measurements[:1])
        rose = self._score_since_start("reward/mean") > RISE_SCORE
        candidates = (
            *map(self._held_out_fall, self.held_out),
            self._diversity_fall(),
            self._motion_fall(),
            self._source_change(),
        )
        falls = [sentence for sentence in candidates if sentence]
        if not rose or not falls:
            return None
        drifts = [phrase for name in DRIFT_THRESHOLDS if (phrase := self._feature_drift(name))]
        note = f" (image statistics changed too: {', '.join(drifts)})" if drifts else ""
        return (
            f"probable reward hacking: the training reward rose {reward}, while {' and '.join(falls)}{note}; look at "
            "the samples, and go back to an earlier checkpoint if they are worse [TM816]"
        )

    def _held_out_fall(self, name: str) -> str | None:
        if name not in self.measurements[0].per_prompt:
            return None
        for since, change in self._falls(name):
            std = max(since[0].std.get(name, 0.0), self.measurements[0].std.get(name, 0.0))
            if change.before - change.after >= SCORE_FALL * std:
                return f"the held-out reward '{name.removeprefix(REWARD_PREFIX)}' fell {change}"
        return None

    def _diversity_fall(self) -> str | None:
        for since, change in self._falls("diversity"):
            if change.after <= (1 - DIVERSITY_FALL) * change.before and self._is_collapse(since, change):
                return f"the diversity among samples of the same prompt fell {change}"
        return None

    def _motion_fall(self) -> str | None:
        if "motion" not in self.measurements[0].per_prompt:
            return None
        for since, change in self._falls("motion"):
            # Noise has motion too: in a video that only became clean, frames still differ.
            frames = self._change("frames", since)
            if change.after <= FROZEN_SHARE * change.before and frames.after <= FROZEN_SHARE * frames.before:
                return f"the motion in the videos fell {change}"
        return None

    def _source_change(self) -> str | None:
        """Whether an editor began to ignore its source, or to copy it."""
        if SOURCE_DISTANCE not in self.measurements[0].per_prompt:
            return None
        change = self._change(SOURCE_DISTANCE, self.measurements[:1])
        if abs(change.after - change.before) < SOURCE_CHANGE:
            return None
        if change.rose and change.after >= IGNORED_SHARE * change.before:
            return f"the samples drifted away from their source images (distance {change})"
        if change.fell and change.after <= COPIED_SHARE * change.before:
            return f"the samples became copies of their source images (distance {change})"
        return None

    def _is_collapse(self, since: Sequence[GuardMeasurement], change: MetricChange) -> bool:
        # Where prompts leave little open, learning them makes their samples alike. It is a collapse if samples of
        # different prompts become alike too, or if hardly any diversity is left.
        if "variety" not in self.measurements[0].per_prompt:
            return True
        variety = self._change("variety", since)
        prompts_alike = variety.after < (1 - VARIETY_FALL) * variety.before
        return prompts_alike or (change.after <= COLLAPSED_SHARE * change.before and not variety.rose)

    def _falls(self, name: str) -> Iterator[tuple[Sequence[GuardMeasurement], MetricChange]]:
        """Yield significant falls since the best window and since the start, unless the reward fell as well."""
        # What falls together with the reward was not traded for it: the run fails, but it does not hack.
        start, best, changes = self.measurements[:1], self._best_window(name), len(self.measurements) - 1
        fell = self._score_since(name, best) < -best_window_boundary(changes)
        if fell and self._score_since("reward/mean", best) > -SLIP_SCORE:
            yield best, self._change(name, best)
        fell = self._score_since_start(name) < -sequential_boundary(changes)
        if fell and self._score_since_start("reward/mean") > -SLIP_SCORE:
            yield start, self._change(name, start)

    def _score_since_start(self, name: str) -> float:
        return float(cumulative_score(np.array([each.per_prompt[name] for each in self.measurements])))

    def _score_since(self, name: str, since: Sequence[GuardMeasurement]) -> float:
        now = self.measurements[-self.patience :]
        return float(student_score(_window_means(name, now) - _window_means(name, since)))

    def _feature_drift(self, name: str) -> str | None:
        if name not in self.measurements[0].per_prompt:
            return None
        change = self._change(name, self.measurements[:1])
        drifted = abs(change.after - change.before) > DRIFT_THRESHOLDS[name]
        return f"{name} {change.before:.3g} -> {change.after:.3g}" if drifted else None

    def _best_window(self, name: str) -> Sequence[GuardMeasurement]:
        earlier, width = self.measurements[: -self.patience], self.patience
        means = np.array([each.per_prompt[name] for each in earlier]).mean(1)
        windows = [means[:1].mean(), *(means[i : i + width].mean() for i in range(len(earlier) - width + 1))]
        best = int(np.argmax(windows))
        return earlier[best - 1 : best - 1 + width] if best else earlier[:1]

    def _change(self, name: str, since: Sequence[GuardMeasurement]) -> MetricChange:
        return compare_measurements(name, since, self.measurements[-self.patience :])


def cumulative_score(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Standard score of all changes of a metric so far, of K measurements of P prompts: [..., K, P] to [...].

    Each measurement is compared with the mean of all before it. These differences (recursive residuals; Brown, Durbin
    and Evans 1975) are independent and of equal variance in a run without a change, and are added up.
    """
    checks = np.arange(1, values.shape[-2])[:, None]
    earlier = values.cumsum(-2)[..., :-1, :] / checks
    return student_score(((values[..., 1:, :] - earlier) * np.sqrt(checks / (checks + 1))).sum(-2))


def student_score(changes: NDArray[np.float64]) -> NDArray[np.float64]:
    """t statistic of the changes of P prompts, as the standard score of the same significance: [..., P] to [...].

    Few prompts have large t statistics by chance, and few large standard scores (approximation of Wallace 1959).
    """
    prompts, degrees = changes.shape[-1], changes.shape[-1] - 1
    error = np.maximum(changes.std(-1, ddof=1) / math.sqrt(prompts), MIN_ERROR)
    t = changes.mean(-1) / error
    size = np.sqrt(degrees * np.log1p(t**2 / degrees)) * (8 * degrees + 1) / (8 * degrees + 3)
    score: NDArray[np.float64] = np.copysign(size, t)
    return score


def sequential_boundary(changes: int) -> float:
    """The cumulative score that a run without a change exceeds at none of its checks, but for FALSE_ALARM_START.

    The sum of independent changes is a random walk. This is the normal mixture boundary for it (Robbins 1970; Howard et
    al. 2021, proposition 6), divided by the standard deviation of the sum of so many changes.
    """
    total = changes + BOUNDARY_SHAPE
    odds = math.sqrt(total / BOUNDARY_SHAPE) / (2 * FALSE_ALARM_START)
    return math.sqrt(2 * total / changes * math.log1p(odds))


def best_window_boundary(changes: int) -> float:
    """The score of a fall since the best of at most `changes` windows, at false alarms of FALSE_ALARM_BEST in a run.

    Bonferroni over the windows, and over all checks with the weights 1 / (k (k + 1)), whose sum is 1.
    """
    return -NormalDist().inv_cdf(FALSE_ALARM_BEST / (changes**2 * (changes + 1)))


def compare_measurements(name: str, since: Sequence[GuardMeasurement], now: Sequence[GuardMeasurement]) -> MetricChange:
    """Return the change of a metric between two windows, with the standard error over prompts."""
    before, after = _window_means(name, since), _window_means(name, now)
    error = (after - before).std(ddof=1) / math.sqrt(len(before))
    return MetricChange(since[0].step, fmean(before), fmean(after), float(error))


def _shape(measurement: GuardMeasurement) -> dict[str, int]:
    return {name: len(values) for name, values in measurement.per_prompt.items()}


def _window_means(name: str, window: Sequence[GuardMeasurement]) -> NDArray[np.float64]:
    """Return the mean of a metric over a window of measurements for each prompt: [P]."""
    means: NDArray[np.float64] = np.array([each.per_prompt[name] for each in window]).mean(0)
    return means
