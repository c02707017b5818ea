"""Whom the contract's tests ask, for what, and how decisions are scored again."""

from __future__ import annotations

from typing import Any

import torch
import toys
from torch import Tensor

from tastemaker.policy import Guidance, Policy
from tastemaker.randomness import Randomness
from tastemaker.types import Condition, Trajectory

GUIDED = Guidance(scale=2.0, interval=(0.2, 0.9))
KINDS = [(name, guidance) for name in toys.GENERATORS for guidance in (None, GUIDED)]
ROWS = 8


def asked(policy: Policy[Any]) -> Condition:
    return policy.embed(toys.PROMPTS * 2, [{"number": i} for i in range(ROWS)])


def rows(*numbers: int) -> Randomness:
    return Randomness(0, 0, torch.tensor(numbers or range(ROWS)))


def made(policy: Policy[Any]) -> Trajectory:
    return policy.sample(asked(policy), rows())


def replayed(policy: Policy[Any], seen: Trajectory) -> list[tuple[Tensor, Tensor]]:
    """Log-probabilities now and then, of the decisions that were taken."""
    pairs = []
    for segment in seen.segments:
        now = policy.decide(seen.cond, segment).log_prob(segment.action)
        taken = segment.mask > 0
        pairs.append((now[taken], segment.log_prob[taken]))
    return pairs
