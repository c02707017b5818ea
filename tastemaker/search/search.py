"""Compute spent at inference: what a search finds, and what it asks of those who judge."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..policy import Policy, Rollout
from ..randomness import Randomness
from ..reward import Rubric, Verdict, Verifier
from ..types import Condition, Facts, PromptBatch, Prompts


@dataclass(frozen=True)
class Price:
    """What was paid: rows times network calls, and pictures judged."""

    calls: int
    judged: int = 0


@dataclass(frozen=True)
class Found:
    x: Tensor  # [B, ...] one sample for each prompt, in model space
    score: Tensor  # [B] the judge's; NaN where nobody judged
    price: Price


def candidates(policy: Policy[Any], cond: Condition, rng: Randomness) -> Rollout:
    """Samples to choose from; nobody trains on their log-probabilities, so they are not scored once more."""
    return replace(policy, process=policy.process.as_sampled()).rollout(cond, rng)


class Search(ABC):
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
