from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ..core.policy import Policy
from ..core.randomness import Randomness
from ..core.reward import Verifier
from ..core.types import PromptBatch, concatenate, select_rows
from .base import Search, SearchCost, SearchResult, split_candidates, start_candidates


@dataclass(frozen=True)
class BestOfN(Search):
    """Outcome selection: of n finished samples a prompt, the one the judge scores best, the first of equals."""

    n: int = 4
    reset: bool = True  # the temperature with every candidate; false is as published

    def __post_init__(self) -> None:
        if self.n < 1:
            raise ValueError(f"'n' is {self.n}; expected at least one sample a prompt")

    @torch.no_grad()
    def find(self, policy: Policy[Any], verifier: Verifier, batch: PromptBatch, rng: Randomness) -> SearchResult:
        cond, draws = policy.embed(batch.prompts, batch.facts).repeat(self.n), rng.repeat(self.n)
        made = split_candidates(policy, len(cond), self.n, reset=self.reset)
        rollouts = [start_candidates(maker, select_rows(cond, rows), select_rows(draws, rows)) for maker, rows in made]
        order = torch.cat([rows for _, rows in made]).argsort()
        final = select_rows(concatenate([rollout.finish().final for rollout in rollouts]), order)
        score = verifier.judge(policy.decode(final), cond.prompts, cond.facts, 1.0).score.view(-1, self.n)
        best = torch.arange(len(batch), device=final.device) * self.n + score.argmax(1)
        return SearchResult(
            final[best], score.amax(1), SearchCost(sum(rollout.price for rollout in rollouts), len(final))
        )
