"""Pairs of samples of which one is preferred, whoever made them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch.nn.functional as F
from torch import Tensor

from ..core.policy import Policy, Process
from ..core.randomness import Randomness
from ..core.types import Condition, Corrupted, Loss
from .reward_guidance import RewardGuidanceBatch

Corruption = Literal["shared", "level", "independent"]


@dataclass(frozen=True)
class PreferenceExperience:
    cond: Condition
    chosen: Tensor  # [B, ...] in model space
    rejected: Tensor  # [B, ...]
    weight: Tensor  # [B] 0 for a pair that says nothing
    rng: Randomness
    reward: Tensor  # [B] of the two, in the mean; 0 where none was asked
    steering: RewardGuidanceBatch | None = None  # by a judge, beside what the pairs say

    def __len__(self) -> int:
        return len(self.cond)


def corrupt_pair(
    policy: Policy[Process], seen: PreferenceExperience, how: Corruption, draw: int
) -> tuple[Corrupted, Corrupted]:
    """Both samples hidden alike, at the same level, or each by itself."""
    chosen = policy.corrupt(seen.chosen, seen.rng, draw=2 * draw)
    if how == "shared":
        return chosen, policy.corrupt(seen.rejected, seen.rng, chosen.t, chosen.noise, draw=2 * draw)
    level = chosen.t if how == "level" else None
    return chosen, policy.corrupt(seen.rejected, seen.rng, level, draw=2 * draw + 1)


def dpo_loss(
    policy: Policy[Process],
    seen: PreferenceExperience,
    noisy: tuple[Corrupted, Corrupted],
    beta: float,
    sft: float,
    reference: str = "reference",
) -> Loss:
    """Prefer the chosen by more than the reference does (Rafailov et al. 2023, equation 7)."""
    cond = seen.cond
    with policy.weights.use(reference):
        was = [policy.likelihood(cond, x, n) for x, n in zip((seen.chosen, seen.rejected), noisy, strict=True)]
    now = [policy.likelihood(cond, x, n) for x, n in zip((seen.chosen, seen.rejected), noisy, strict=True)]
    margin = beta * ((now[0] - was[0]) - (now[1] - was[1]))
    rows = -F.logsigmoid(margin) - sft * now[0] / policy.process.hidden(noisy[0])
    watched = {"accuracy": (margin > 0).float(), "margin": margin.detach(), "chosen": (now[0] - was[0]).detach()}
    return Loss(rows * seen.weight, watched)
