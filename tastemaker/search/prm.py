"""Step-wise search with a process reward model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ..core.policy import Policy
from ..core.randomness import Randomness
from ..core.registry import ConfigError
from ..core.reward import Verifier
from ..core.types import PromptBatch
from .base import Search, SearchCost, SearchResult, start_candidates


@dataclass(frozen=True)
class PRMSearch(Search):
    """At every step all n candidates of a prompt continue from copies of the one with the highest score.

    Use a judge whose question is prm, or any reward.
    """

    n: int = 4
    start_progress: float = 0.0  # progress before which candidates are not compared
    interval: int = 1  # steps between two comparisons

    def __post_init__(self) -> None:
        if self.n < 1 or not 0 <= self.start_progress <= 1 or self.interval < 1:
            raise ValueError(
                "expected n of at least 1, start_progress from 0 to 1 and interval of at least 1, got n "
                f"{self.n}, start_progress {self.start_progress}, interval {self.interval}; correct these "
                "settings [TM579]"
            )

    @torch.no_grad()
    def run(self, policy: Policy[Any], verifier: Verifier, batch: PromptBatch, rng: Randomness) -> SearchResult:
        if not policy.process.stochastic:
            raise ConfigError(
                "--search: prm continues from copies of one sample, so the sampler must draw noise at every "
                "step, but this sampler does not; use --search parm, or a stochastic sampler [TM580]"
            )
        cond, draws = policy.embed(batch.prompts, batch.metadata).repeat(self.n), rng.repeat(self.n)
        rollout = start_candidates(policy, cond, draws)
        rollout.reseed(draws)  # refuses rollouts that cannot, before a network call
        first = torch.arange(len(batch), device=rng.rows.device) * self.n
        comparisons, steps = 0, 0
        while True:
            rollout.step()
            steps += 1
            due = self.start_progress <= rollout.progress and steps % self.interval == 0
            if not due and rollout.progress < 1:
                continue
            verdict = verifier.judge(policy.decode(rollout.preview()), cond.prompts, cond.metadata, rollout.progress)
            score, comparisons = verdict.score.view(-1, self.n), comparisons + 1
            best = first + score.argmax(1)
            if rollout.progress == 1:
                cost = SearchCost(rollout.network_calls, comparisons * len(cond))
                return SearchResult(rollout.preview()[best], score.amax(1), cost)
            rollout.select(best.repeat_interleave(self.n))
            rollout.reseed(draws)  # copies get noise of their own again
