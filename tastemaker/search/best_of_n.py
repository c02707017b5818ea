"""Sampling without search, and best-of-N."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from ..core.policy import Policy
from ..core.randomness import Randomness
from ..core.reward import Verifier
from ..core.types import PromptBatch, concatenate, select_rows
from .base import Search, SearchCost, SearchResult, check_candidates, split_candidates, start_candidates


@dataclass(frozen=True)
class SingleSample(Search):
    """One sample per prompt; the verifier is not asked."""

    uses_verifier: ClassVar[bool] = False

    @torch.no_grad()
    def run(self, policy: Policy[Any], verifier: Verifier, batch: PromptBatch, rng: Randomness) -> SearchResult:
        rollout = start_candidates(policy, policy.embed(batch.prompts, batch.metadata), rng)
        final = rollout.finish().final
        score = torch.full((len(batch),), torch.nan, device=final.device)
        return SearchResult(final, score, SearchCost(rollout.network_calls))


@dataclass(frozen=True)
class BestOfN(Search):
    """Of n finished samples per prompt, the one with the highest score; the first of equals."""

    n: int = 4
    reset_temperature: bool = True  # for every candidate of a masked generator; false is as published

    def __post_init__(self) -> None:
        check_candidates(self.n)

    @torch.no_grad()
    def run(self, policy: Policy[Any], verifier: Verifier, batch: PromptBatch, rng: Randomness) -> SearchResult:
        cond, draws = policy.embed(batch.prompts, batch.metadata).repeat(self.n), rng.repeat(self.n)
        shares = split_candidates(policy, len(cond), self.n, reset_temperature=self.reset_temperature)
        rollouts = [start_candidates(p, select_rows(cond, rows), select_rows(draws, rows)) for p, rows in shares]
        order = torch.cat([rows for _, rows in shares]).argsort()
        final = select_rows(concatenate([rollout.finish().final for rollout in rollouts]), order)
        score = verifier.judge(policy.decode(final), cond.prompts, cond.metadata, 1.0).score.view(-1, self.n)
        best = torch.arange(len(batch), device=final.device) * self.n + score.argmax(1)
        cost = SearchCost(sum(rollout.network_calls for rollout in rollouts), len(final))
        return SearchResult(final[best], score.amax(1), cost)
