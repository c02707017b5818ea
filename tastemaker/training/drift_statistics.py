"""Statistics of the guard: measurements on fixed prompts, and the test for reward hacking.

Every look is at the same prompts from the same noise, so looks are compared prompt by prompt, and how much the changes
of single prompts differ says how much of their mean is noise (a paired t statistic). A change counts if it is beyond
noise and large enough to matter, and if it lasts: the present is the mean of the last `patience` looks, compared with
the start and with every earlier stretch of as many looks, of which the best is what was lost.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean, stdev
from typing import Any

# Standard errors beyond noise: of a rise or a fall since the start, and of a fall from a stretch that was chosen for
# being high. A reward that fell by as few as SLIP in the meantime was not gained.
RISE_ERRORS, FALL_ERRORS, FALL_FROM_BEST_ERRORS, SLIP_ERRORS = 3.0, 3.5, 5.0, 2.0
# Falls that matter: a held-out reward's in standard deviations of single samples (of a verdict, an eighth of all
# pictures or less), the others' as shares of themselves.
SCORE_FALL, DIVERSITY_FALL, VARIETY_FALL = 0.25, 0.25, 0.1
COLLAPSED_SHARE = 0.2  # of its former diversity: hardly any is left
FROZEN_SHARE = 0.5  # of their former motion, while frames grow alike: clips come to rest
REWARD_PREFIX = "reward/"
DRIFT_THRESHOLDS = {
    "entropy": 1.0,
    "edges": 0.1,
    "saturation": 0.1,
    "dark": 0.1,
    "flicker": 0.02,
}  # and drift worth a word


@dataclass(frozen=True)
class GuardMeasurement:
    """One value a prompt of each name: reward, reward/<name>, diversity, variety, features of pictures and clips."""

    step: int
    rows: Mapping[str, list[float]]
    spread: Mapping[str, float]  # standard deviation of single samples, of the rewards

    def mean(self, name: str) -> float:
        return fmean(self.rows[name])

    def means(self) -> dict[str, float]:
        return {name: fmean(values) for name, values in self.rows.items()}


@dataclass(frozen=True)
class MetricChange:
    """From a stretch of looks to another, prompt by prompt."""

    since: int
    before: float
    after: float
    error: float  # of the difference

    @property
    def rose(self) -> bool:
        return self.after - self.before > RISE_ERRORS * self.error

    @property
    def fell(self) -> bool:
        return self.fell_by(FALL_ERRORS)

    def fell_by(self, errors: float) -> bool:
        return self.before - self.after > errors * self.error

    def __str__(self) -> str:
        return f"from {self.before:.3g} to {self.after:.3g} since step {self.since}"


class GuardHistory:
    """All looks so far, as plain data that goes into the checkpoint."""

    def __init__(self, held_out: Sequence[str] = (), patience: int = 2) -> None:
        self.held_out, self.patience = tuple(f"{REWARD_PREFIX}{name}" for name in held_out), patience
        self.looks: list[GuardMeasurement] = []

    def state(self) -> list[dict[str, Any]]:
        return [asdict(look) for look in self.looks]

    def restore(self, state: Sequence[Mapping[str, Any]]) -> None:
        self.looks = [GuardMeasurement(int(look["step"]), dict(look["rows"]), dict(look["spread"])) for look in state]

    def add(self, look: GuardMeasurement) -> None:
        """Remember a look; one at other prompts or rewards than before begins anew."""
        if self.looks and _shape(self.looks[0]) != _shape(look):
            self.looks.clear()
        self.looks.append(look)

    @property
    def best(self) -> int | None:
        """The step with the highest held-out score, each reward in standard deviations at the start."""
        names = [name for name in self.held_out if self.looks and name in self.looks[0].rows]
        if not names:
            return None
        scales = {name: self.looks[0].spread.get(name) or 1.0 for name in names}
        return max(self.looks, key=lambda look: sum(look.mean(name) / scales[name] for name in names)).step

    def suspicion(self) -> str | None:
        """The sentence that says what speaks for reward hacking; None if nothing does."""
        if len(self.looks) <= self.patience:
            return None
        start = self.looks[:1]
        reward = self._change("reward", start)
        falls = [told for told in (*map(self._lost, self.held_out), self._narrowed(), self._frozen()) if told]
        if not reward.rose or not falls:
            return None
        drift = [told for name in DRIFT_THRESHOLDS if (told := self._drifted(name))]
        look = f" (the pictures changed too: {', '.join(drift)})" if drift else ""
        return f"probable reward hacking: the training reward rose {reward}, while {' and '.join(falls)}{look}"

    def _lost(self, name: str) -> str | None:
        if name not in self.looks[0].rows:
            return None
        for since, change in self._falls(name):
            matters = SCORE_FALL * max(since[0].spread.get(name, 0.0), self.looks[0].spread.get(name, 0.0))
            if change.before - change.after >= matters:
                return f"the held-out reward '{name.removeprefix(REWARD_PREFIX)}' fell {change}"
        return None

    def _narrowed(self) -> str | None:
        for since, change in self._falls("diversity"):
            if change.after <= (1 - DIVERSITY_FALL) * change.before and self._collapsed(since, change):
                return f"the diversity of samples of one prompt fell {change}"
        return None

    def _frozen(self) -> str | None:
        if "motion" not in self.looks[0].rows:
            return None
        for since, change in self._falls("motion"):
            # Motion is seen in boiling noise too; a clip that only became clean still shows different frames.
            apart = self._change("frames", since)
            if change.after <= FROZEN_SHARE * change.before and apart.after <= FROZEN_SHARE * apart.before:
                return f"the clips came to rest: their motion fell {change}"
        return None

    def _collapsed(self, since: Sequence[GuardMeasurement], change: MetricChange) -> bool:
        # Where prompts leave little open, learning them makes their samples alike. It is a collapse if different
        # prompts grow alike too, or if hardly any difference between samples is left.
        if "variety" not in self.looks[0].rows:
            return True
        apart = self._change("variety", since)
        alike = apart.after < (1 - VARIETY_FALL) * apart.before
        return alike or (change.after <= COLLAPSED_SHARE * change.before and not apart.rose)

    def _falls(self, name: str) -> Iterator[tuple[Sequence[GuardMeasurement], MetricChange]]:
        """From the best stretch and from the start, where the reward did not fall since then too."""
        for since, errors in ((self._best_stretch(name), FALL_FROM_BEST_ERRORS), (self.looks[:1], FALL_ERRORS)):
            change = self._change(name, since)
            # What falls together with the reward was not traded for it: then the run is failing, not cheating.
            if change.fell_by(errors) and not self._change("reward", since).fell_by(SLIP_ERRORS):
                yield since, change

    def _drifted(self, name: str) -> str | None:
        if name not in self.looks[0].rows:
            return None
        change = self._change(name, self.looks[:1])
        far = abs(change.after - change.before) > DRIFT_THRESHOLDS[name]
        return f"{name} {change.before:.3g} -> {change.after:.3g}" if far else None

    def _best_stretch(self, name: str) -> Sequence[GuardMeasurement]:
        earlier, width = self.looks[: -self.patience], self.patience
        stretches = [earlier[:1], *(earlier[i : i + width] for i in range(len(earlier) - width + 1))]
        return max(stretches, key=lambda stretch: fmean(look.mean(name) for look in stretch))

    def _change(self, name: str, since: Sequence[GuardMeasurement]) -> MetricChange:
        return compare_measurements(name, since, self.looks[-self.patience :])


def compare_measurements(name: str, since: Sequence[GuardMeasurement], now: Sequence[GuardMeasurement]) -> MetricChange:
    """What became of one name from some looks to others."""
    before, after = _averaged(name, since), _averaged(name, now)
    apart = [b - a for a, b in zip(before, after, strict=True)]
    error = stdev(apart) / math.sqrt(len(apart))
    return MetricChange(since[0].step, fmean(before), fmean(after), error)


def _shape(look: GuardMeasurement) -> dict[str, int]:
    return {name: len(values) for name, values in look.rows.items()}


def _averaged(name: str, looks: Sequence[GuardMeasurement]) -> list[float]:
    return [fmean(values) for values in zip(*(look.rows[name] for look in looks), strict=True)]
