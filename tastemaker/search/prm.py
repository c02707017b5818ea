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
    """Step-wise selection: of n unfinished samples a prompt all go on from the one the judge scores best.

    Ask a judge whose question is prm, or any reward.
    """

    n: int = 4
    first: float = 0.0  # progress before which nobody is judged
    every: int = 1  # steps from one look to the next

    def __post_init__(self) -> None:
        if self.n < 1 or not 0 <= self.first <= 1 or self.every < 1:
            found = f"n {self.n}, first {self.first}, every {self.every}"
            raise ValueError(
                f"found {found}; expected at least one sample, progress from 0 to 1, and at least one step"
            )

    @torch.no_grad()
    def find(self, policy: Policy[Any], verifier: Verifier, batch: PromptBatch, rng: Randomness) -> SearchResult:
        if not policy.process.chance:
            raise ConfigError(
                "--search: prm goes on from copies of one sample, which must have draws of their own at every step; "
                "the sampler has none, so choose parm, or one that takes chances"
            )
        cond, draws = policy.embed(batch.prompts, batch.facts).repeat(self.n), rng.repeat(self.n)
        rollout = start_candidates(policy, cond, draws)
        rollout.redraw(draws)  # whoever cannot says so before anything is made
        owner = torch.arange(len(batch), device=rng.rows.device) * self.n
        looks, taken = 0, 0
        while True:
            rollout.step()
            taken += 1
            due = self.first <= rollout.progress and taken % self.every == 0
            if not due and rollout.progress < 1:
                continue
            verdict = verifier.judge(policy.decode(rollout.preview()), cond.prompts, cond.facts, rollout.progress)
            score, looks = verdict.score.view(-1, self.n), looks + 1
            best = owner + score.argmax(1)
            if rollout.progress == 1:
                return SearchResult(
                    rollout.preview()[best], score.amax(1), SearchCost(rollout.price, looks * len(cond))
                )
            rollout.select(best.repeat_interleave(self.n))
            rollout.redraw(draws)  # copies part again
