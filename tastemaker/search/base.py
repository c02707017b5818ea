"""The interface of inference-time search: its result, its cost and its verifier."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..core.policy import Policy, Rollout
from ..core.randomness import Randomness
from ..core.reward import Rubric, Verdict, Verifier
from ..core.types import Condition, Metadata, PromptBatch, Prompts
from ..processes.masked import MaskedProcess


@dataclass(frozen=True)
class SearchCost:
    """Cost of a search: network calls times samples, verifier calls, and the floating-point operations of both."""

    calls: float
    judged: float = 0
    flops: float = 0.0  # where somebody counted them

    def __add__(self, other: SearchCost) -> SearchCost:
        return SearchCost(self.calls + other.calls, self.judged + other.judged, self.flops + other.flops)

    def each(self, rows: int) -> SearchCost:
        """Of one row, on average."""
        return SearchCost(self.calls / rows, self.judged / rows, self.flops / rows)


@dataclass(frozen=True)
class SearchResult:
    x: Tensor  # [B, ...] one sample for each prompt, in model space
    score: Tensor  # [B] the judge's; NaN where nobody judged
    price: SearchCost


def start_candidates(policy: Policy[Any], cond: Condition, rng: Randomness) -> Rollout:
    """Samples to choose from; nobody trains on their log-probabilities, so they are not scored once more."""
    return replace(policy, process=policy.process.as_sampled()).rollout(cond, rng)


def split_candidates(policy: Policy[Any], rows: int, n: int, *, reset: bool) -> list[tuple[Policy[Any], Tensor]]:
    """Who makes which of the candidates, n a prompt: one for all, or without chance all but the first of a prompt.

    The published searches anneal the temperature of masked generators once and never reset it, so that from the second
    candidate on it is nought.
    """
    everyone = torch.arange(rows)
    if reset:
        return [(policy, everyone)]
    if not isinstance(policy.process, MaskedProcess):
        raise ValueError("'reset' is false, but only masked generators have a temperature to anneal; leave it out")
    cold = replace(policy, process=replace(policy.process, temperature=0.0))
    first = everyone % n == 0
    made = [(policy, everyone[first]), (cold, everyone[~first])]
    return [share for share in made if len(share[1])]


class Search(ABC):
    even: ClassVar[bool] = True  # the network is called as often, whatever comes of it

    @abstractmethod
    def find(self, policy: Policy[Any], verifier: Verifier, batch: PromptBatch, rng: Randomness) -> SearchResult:
        """One sample for each prompt."""


@dataclass(frozen=True)
class RubricVerifier:
    """A rubric as verifier: from `clear_from` on it judges, and a score of `promising_at` is promising."""

    rubric: Rubric
    clear_from: float = 0.5  # of the rollout
    promising_at: float = 0.0  # score

    def judge(self, pixels: Tensor, prompts: Prompts, facts: Sequence[Metadata], progress: float) -> Verdict:
        score = self.rubric.score(pixels, prompts, facts).total
        return Verdict(
            torch.full_like(score, progress >= self.clear_from, dtype=torch.bool), score >= self.promising_at, score
        )
