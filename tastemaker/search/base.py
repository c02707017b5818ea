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


@dataclass(frozen=True)
class SearchCost:
    """Cost of a search: network calls times samples, verifier calls, and the floating-point operations of both.

    The field names are keys of metadata.jsonl, samples.jsonl and report.json.
    """

    calls: float  # of the network
    verifier_calls: float = 0
    flops: float = 0.0  # 0 if they were not counted

    def __add__(self, other: SearchCost) -> SearchCost:
        return SearchCost(
            self.calls + other.calls, self.verifier_calls + other.verifier_calls, self.flops + other.flops
        )

    def per_sample(self, count: int) -> SearchCost:
        return SearchCost(self.calls / count, self.verifier_calls / count, self.flops / count)


@dataclass(frozen=True)
class SearchResult:
    x: Tensor  # [B, ...] one sample per prompt, in model space
    score: Tensor  # [B] by the verifier; NaN if it was not asked
    cost: SearchCost


class Search(ABC):
    """An inference-time search for the best sample of each prompt."""

    constant_cost: ClassVar[bool] = True  # the number of network calls does not depend on scores
    uses_verifier: ClassVar[bool] = True

    @abstractmethod
    def run(self, policy: Policy[Any], verifier: Verifier, batch: PromptBatch, rng: Randomness) -> SearchResult:
        """Search one sample for each prompt."""


def start_candidates(policy: Policy[Any], cond: Condition, rng: Randomness) -> Rollout:
    """Start rollouts that are not trained on, so the process need not recompute their log-probabilities."""
    return replace(policy, process=policy.process.with_sampled_log_probs()).rollout(cond, rng)


def split_candidates(
    policy: Policy[Any], count: int, n: int, *, reset_temperature: bool
) -> list[tuple[Policy[Any], Tensor]]:
    """Which policy generates which of `count` candidates, n per prompt: [(policy, rows)].

    The published searches anneal the temperature of masked generators once and never reset it, so that it is 0 from
    the second candidate of a prompt on; `reset_temperature` restarts its annealing for every candidate.
    """
    rows = torch.arange(count)
    if reset_temperature:
        return [(policy, rows)]
    greedy = replace(policy, process=policy.process.without_temperature())
    first = rows % n == 0
    return [share for share in ((policy, rows[first]), (greedy, rows[~first])) if len(share[1])]


def check_candidates(n: int) -> None:
    if n < 1:
        raise ValueError(f"'n': expected at least one sample per prompt, got {n}; raise 'n' [TM557]")


@dataclass(frozen=True)
class RubricVerifier(Verifier):
    """A rubric as verifier: previews are clear from `clear_progress`, and promising from `promising_score`."""

    rubric: Rubric
    clear_progress: float = 0.5
    promising_score: float = 0.0

    def judge(self, pixels: Tensor, prompts: Prompts, metadata: Sequence[Metadata], progress: float) -> Verdict:
        score = self.rubric.score(pixels, prompts, metadata).total
        clear = torch.full_like(score, progress >= self.clear_progress, dtype=torch.bool)
        return Verdict(clear, score >= self.promising_score, score)
