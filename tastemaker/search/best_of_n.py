from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ..policy import Policy
from ..randomness import Randomness
from ..reward import Verifier
from ..types import PromptBatch
from .search import Found, Price, Search, candidates


@dataclass(frozen=True)
class BestOfN(Search):
    """Outcome selection: of n finished samples a prompt, the one the judge scores best, the first of equals."""

    n: int = 4

    def __post_init__(self) -> None:
        if self.n < 1:
            raise ValueError(f"'n' is {self.n}; expected at least one sample a prompt")

    @torch.no_grad()
    def find(self, policy: Policy[Any], verifier: Verifier, batch: PromptBatch, rng: Randomness) -> Found:
        cond = policy.embed(batch.prompts, batch.facts).repeat(self.n)
        rollout = candidates(policy, cond, rng.repeat(self.n))
        final, cond = rollout.finish().final, rollout.cond
        score = verifier.judge(policy.decode(final), cond.prompts, cond.facts, 1.0).score.view(-1, self.n)
        best = torch.arange(len(batch), device=final.device) * self.n + score.argmax(1)
        return Found(final[best], score.amax(1), Price(rollout.price, len(final)))
