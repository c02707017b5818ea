"""What the guard remembers, and when it speaks.

Every look is at the same prompts from the same noise, so looks are compared prompt by prompt, and how much the changes
of single prompts differ says how much of their mean is noise (a paired t statistic). A change counts if it is beyond
noise and large enough to matter, and if it lasts: the present is the mean of the last `patience` looks, compared with
the start and with every earlier stretch of as many looks, of which the best is what was lost.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean, stdev
from typing import Any

BEYOND_NOISE = 4.0  # standard errors: there are many looks, and the stretch to compare is chosen for being high
# Falls that matter: a held-out reward's in standard deviations of single samples, the others' as shares of themselves.
SCORE_FALL, DIVERSITY_FALL, VARIETY_FALL = 0.5, 0.25, 0.1
SAME = 0.2  # of its former diversity: hardly any is left
PART = "reward/"
FEATURES = {"entropy": 1.0, "edges": 0.1, "saturation": 0.1, "dark": 0.1}  # and the drift worth a word


@dataclass(frozen=True)
class Look:
    """One value a prompt of each name: reward, reward/<name>, diversity, variety and the features of the pictures."""

    step: int
    rows: Mapping[str, list[float]]
    spread: Mapping[str, float]  # standard deviation of single samples, of the rewards

    def mean(self, name: str) -> float:
        return fmean(self.rows[name])

    def means(self) -> dict[str, float]:
        return {name: fmean(values) for name, values in self.rows.items()}


@dataclass(frozen=True)
class Change:
    """From a stretch of looks to another, prompt by prompt."""

    since: int
    before: float
    after: float
    error: float  # of the difference

    @property
    def rose(self) -> bool:
        return self.after - self.before > BEYOND_NOISE * self.error

    @property
    def fell(self) -> bool:
        return self.before - self.after > BEYOND_NOISE * self.error

    def __str__(self) -> str:
        return f"from {self.before:.3g} to {self.after:.3g} since step {self.since}"


class History:
    """All looks so far, as plain data that goes into the checkpoint."""

    def __init__(self, held_out: Sequence[str] = (), patience: int = 2) -> None:
        self.held_out, self.patience = tuple(f"{PART}{name}" for name in held_out), patience
        self.looks: list[Look] = []

    def state(self) -> list[dict[str, Any]]:
        return [asdict(look) for look in self.looks]

    def restore(self, state: Sequence[Mapping[str, Any]]) -> None:
        self.looks = [Look(int(look["step"]), dict(look["rows"]), dict(look["spread"])) for look in state]

    def add(self, look: Look) -> None:
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
        falls = [told for told in (*map(self._lost, self.held_out), self._narrowed()) if told]
        if not reward.rose or not falls:
            return None
        drift = [told for name in FEATURES if (told := self._drifted(name))]
        look = f" (the pictures changed too: {', '.join(drift)})" if drift else ""
        return f"probable reward hacking: the training reward rose {reward}, while {' and '.join(falls)}{look}"

    def _lost(self, name: str) -> str | None:
        if name not in self.looks[0].rows:
            return None
        best = self._best_stretch(name)
        change = self._change(name, best)
        matters = SCORE_FALL * max(best[0].spread.get(name, 0.0), self.looks[0].spread.get(name, 0.0))
        if not change.fell or change.before - change.after < matters or self._reward_fell(best):
            return None
        return f"the held-out reward '{name.removeprefix(PART)}' fell {change}"

    def _narrowed(self) -> str | None:
        best = self._best_stretch("diversity")
        change = self._change("diversity", best)
        if not change.fell or change.after > (1 - DIVERSITY_FALL) * change.before or self._reward_fell(best):
            return None
        if "variety" in self.looks[0].rows:
            # Where prompts leave little open, learning them makes their samples alike. It is a collapse if different
            # prompts grow alike too, or if hardly any difference between samples is left.
            apart = self._change("variety", best)
            alike = apart.after < (1 - VARIETY_FALL) * apart.before
            if not alike and (change.after > SAME * change.before or apart.rose):
                return None
        return f"the diversity of samples of one prompt fell {change}"

    def _drifted(self, name: str) -> str | None:
        change = self._change(name, self.looks[:1])
        far = abs(change.after - change.before) > FEATURES[name]
        return f"{name} {change.before:.3g} -> {change.after:.3g}" if far else None

    def _reward_fell(self, stretch: Sequence[Look]) -> bool:
        # What falls together with the reward was not traded for it: then the run is failing, not cheating.
        return self._change("reward", stretch).fell

    def _best_stretch(self, name: str) -> Sequence[Look]:
        earlier, width = self.looks[: -self.patience], self.patience
        stretches = [earlier[:1], *(earlier[i : i + width] for i in range(len(earlier) - width + 1))]
        return max(stretches, key=lambda stretch: fmean(look.mean(name) for look in stretch))

    def _change(self, name: str, since: Sequence[Look]) -> Change:
        before, after = _averaged(name, since), _averaged(name, self.looks[-self.patience :])
        apart = [b - a for a, b in zip(before, after, strict=True)]
        error = stdev(apart) / math.sqrt(len(apart))
        return Change(since[0].step, fmean(before), fmean(after), error)


def _shape(look: Look) -> dict[str, int]:
    return {name: len(values) for name, values in look.rows.items()}


def _averaged(name: str, looks: Sequence[Look]) -> list[float]:
    return [fmean(values) for values in zip(*(look.rows[name] for look in looks), strict=True)]
