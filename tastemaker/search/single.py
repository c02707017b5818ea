from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ..core.policy import Policy
from ..core.randomness import Randomness
from ..core.reward import Verifier
from ..core.types import PromptBatch
from .base import Search, SearchCost, SearchResult, start_candidates


@dataclass(frozen=True)
class SingleSample(Search):
    """One sample a prompt, unjudged."""

    @torch.no_grad()
    def find(self, policy: Policy[Any], verifier: Verifier, batch: PromptBatch, rng: Randomness) -> SearchResult:
        rollout = start_candidates(policy, policy.embed(batch.prompts, batch.facts), rng)
        final = rollout.finish().final
        return SearchResult(final, torch.full((len(batch),), torch.nan, device=final.device), SearchCost(rollout.price))
