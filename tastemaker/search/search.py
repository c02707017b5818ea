"""Compute spent at inference: what a search finds, and what it asks of those who judge."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..policy import Policy, Rollout
from ..processes.masked import Masked
from ..randomness import Randomness
from ..reward import Rubric, Verdict, Verifier
from ..types import Condition, Facts, PromptBatch, Prompts


@dataclass(frozen=True)
class Price:
    """What was paid: rows times network calls, pictures judged, and the floating-point operations of both."""

    calls: float
    judged: float = 0
    flops: float = 0.0  # where somebody counted them

    def __add__(self, other: Price) -> Price:
        return Price(self.calls + other.calls, self.judged + other.judged, self.flops + other.flops)

    def each(self, rows: int) -> Price:
        """Of one row, on average."""
        return Price(self.calls / rows, self.judged / rows, self.flops / rows)


@dataclass(frozen=True)
class Found:
    x: Tensor  # [B, ...] one sample for each prompt, in model space
    score: Tensor  # [B] the judge's; NaN where nobody judged
    price: Price


def candidates(policy: Policy[Any], cond: Condition, rng: Randomness) -> Rollout:
    """Samples to choose from; nobody trains on their log-probabilities, so they are not scored once more."""
    return replace(policy, process=policy.process.as_sampled()).rollout(cond, rng)


def shares(policy: Policy[Any], rows: int, n: int, *, reset: bool) -> list[tuple[Policy[Any], Tensor]]:
    """Who makes which of the candidates, n a prompt: one for all, or without chance all but the first of a prompt.

    The published searches anneal the temperature of masked generators once and never reset it, so that from the second
    candidate on it is nought.
    """
    everyone = torch.arange(rows)
    if reset:
        return [(policy, everyone)]
    if not isinstance(policy.process, Masked):
        raise ValueError("'reset' is false, but only masked generators have a temperature to anneal; leave it out")
    cold = replace(policy, process=replace(policy.process, temperature=0.0))
    first = everyone % n == 0
    made = [(policy, everyone[first]), (cold, everyone[~first])]
    return [share for share in made if len(share[1])]


class Search(ABC):
    even: ClassVar[bool] = True  # the network is called as often, whatever comes of it

    @abstractmethod
    def find(self, policy: Policy[Any], verifier: Verifier, batch: PromptBatch, rng: Randomness) -> Found:
        """One sample for each prompt."""


@dataclass(frozen=True)
class Outcome:
    """A rubric as verifier: from `clear_from` on it judges, and a score of `promising_at` is promising."""

    rubric: Rubric
    clear_from: float = 0.5  # of the rollout
    promising_at: float = 0.0  # score

    def judge(self, pixels: Tensor, prompts: Prompts, facts: Sequence[Facts], progress: float) -> Verdict:
        score = self.rubric.score(pixels, prompts, facts).total
        return Verdict(
            torch.full_like(score, progress >= self.clear_from, dtype=torch.bool), score >= self.promising_at, score
        )
