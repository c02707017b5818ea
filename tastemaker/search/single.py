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
class Single(Search):
    """One sample a prompt, unjudged."""

    @torch.no_grad()
    def find(self, policy: Policy[Any], verifier: Verifier, batch: PromptBatch, rng: Randomness) -> Found:
        rollout = candidates(policy, policy.embed(batch.prompts, batch.facts), rng)
        final = rollout.finish().final
        return Found(final, torch.full((len(batch),), torch.nan, device=final.device), Price(rollout.price))
