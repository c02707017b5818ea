"""Zero-order search for the initial noise from which a deterministic sampler generates the best sample."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..core.policy import Policy
from ..core.randomness import Purpose, Randomness
from ..core.reward import Verifier
from ..core.types import PromptBatch, concatenate, select_rows
from .base import Search, SearchCost, SearchResult, check_candidates, start_candidates


@dataclass(frozen=True)
class Candidates:
    """Finished samples with the initial noise that they came from."""

    start: Tensor  # [B, *shape]
    final: Tensor  # [B, *shape]
    score: Tensor  # [B]


@dataclass(frozen=True)
class NoiseSearch(Search):
    """n random noises per prompt, then rounds of n neighbors of the best noise so far.

    A neighbor of the noise z is (z + step_size u) / sqrt(1 + step_size^2) with new noise u, which has the same
    variance as z. Samples follow the ODE, whichever sampler is configured. One round is best-of-N, and `rounds` rounds
    cost as many calls as best of n * rounds.
    """

    n: int = 4
    rounds: int = 4
    step_size: float = 0.5  # distance of neighbors; large values are random search

    def __post_init__(self) -> None:
        check_candidates(self.n)
        if self.rounds < 1 or not (self.step_size > 0 and math.isfinite(self.step_size)):
            raise ValueError(
                f"expected rounds of at least 1 and step_size above 0, got rounds {self.rounds} and step_size "
                f"{self.step_size}; correct these settings [TM1626]"
            )

    @torch.no_grad()
    def run(self, policy: Policy[Any], verifier: Verifier, batch: PromptBatch, rng: Randomness) -> SearchResult:
        policy = replace(policy, process=policy.process.deterministic())
        cond = policy.embed(batch.prompts, batch.metadata).repeat(self.n)
        prompts = torch.arange(len(batch), device=rng.rows.device)
        pivot, cost = None, SearchCost(0)
        for k in range(self.rounds):
            draws = replace(rng, step=rng.step + k).repeat(self.n)
            rollout = start_candidates(policy, cond, draws)
            rollout.set_start(rollout.start if pivot is None else self.neighbors(pivot.start, draws))
            final = rollout.finish().final
            score = verifier.judge(policy.decode(final), cond.prompts, cond.metadata, 1.0).score
            best = prompts * self.n + score.view(-1, self.n).argmax(1)
            found = select_rows(Candidates(rollout.start, final, score), best)
            if pivot is not None:  # the pivot stays unless a neighbor is better
                better = found.score > pivot.score
                found = select_rows(concatenate([pivot, found]), prompts + len(batch) * better)
            pivot, cost = found, cost + SearchCost(rollout.network_calls, len(cond))
        assert pivot is not None
        return SearchResult(pivot.final, pivot.score, cost)

    def neighbors(self, pivot: Tensor, draws: Randomness) -> Tensor:
        """n neighbors of each initial noise [prompts, *shape]: [prompts * n, *shape]."""
        distance = self.step_size * draws.normal(Purpose.NEIGHBOR, *pivot.shape[1:])
        return (pivot.repeat_interleave(self.n, 0) + distance) / math.sqrt(1 + self.step_size**2)
