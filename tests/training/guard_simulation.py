"""Simulated runs of the guard with a held-out yes/no reward, for tests and for the table of docs/guard.md.

`PYTHONPATH=. python tests/training/guard_simulation.py` prints the table. Verdicts are simulated; the statistics and
the warning are those of the package.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from tastemaker.config.schema import GuardConfig
from tastemaker.training.drift_statistics import GuardHistory, GuardMeasurement

STEPS, STRICT_START, STRICT_END = 120, 0.48, 0.31  # of GRPO on the lenient rule of the playground
DEFAULT = GuardConfig()
CHECKS = 1 + math.ceil(STEPS / DEFAULT.interval(STEPS))
OTHERS = ("diversity", "variety", "entropy", "edges", "saturation", "dark")


def sample_verdicts(
    rng: np.random.Generator, runs: int, end: float, checks: int = CHECKS, guard: GuardConfig = DEFAULT
) -> NDArray[np.float64]:
    """Shares of strict verdicts [R, K, P] of runs whose mean rate goes from STRICT_START to `end` in a line.

    Prompts are easy or hard, and the rate of some falls much more than that of others.
    """
    difficulty = rng.beta(1.2, 1.3, (runs, 1, guard.prompts))  # mean .48
    fall = (1 - end / STRICT_START) * rng.uniform(0, 2, difficulty.shape) * np.linspace(0, 1, checks)[None, :, None]
    rates = np.clip(difficulty * (1 - fall), 0, 1)
    return rng.binomial(guard.samples_per_prompt, rates) / guard.samples_per_prompt


def is_warned(verdicts: NDArray[np.float64]) -> bool:
    """Whether the guard warns at any check of a run with these verdicts [K, P], while the reward rises."""
    history, (checks, prompts) = GuardHistory(["strict"], DEFAULT.patience), verdicts.shape
    for step, row in enumerate(verdicts):
        reward = 0.25 * step / checks + 0.1 * np.linspace(0, 1, prompts) * (1 + row)
        values = {"reward/mean": list(reward), "rewards/strict": list(row), **dict.fromkeys(OTHERS, [0.5] * prompts)}
        history.add(GuardMeasurement(step, values, {"rewards/strict": math.sqrt(row.mean() * (1 - row.mean()))}))
        if history.hacking_warning():
            return True
    return False


def main(runs: int = 300) -> None:
    print("| checks | prompts x samples | .48 to .31 | .48 to .40 | flat |\n|---|---|---|---|---|")
    for checks, prompts, samples in ((5, 64, 4), (13, 16, 4), (13, 64, 2), (13, 64, 4), (13, 128, 4), (25, 64, 4)):
        guard, rng = GuardConfig(prompts=prompts, samples_per_prompt=samples), np.random.default_rng(0)
        shares = [
            np.mean([is_warned(run) for run in sample_verdicts(rng, runs, end, checks, guard)])
            for end in (STRICT_END, 0.40, STRICT_START)
        ]
        print(f"| {checks} | {prompts} x {samples} | {' | '.join(f'{share:.3f}' for share in shares)} |")


if __name__ == "__main__":
    main()
