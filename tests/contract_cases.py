"""Policies, prompts and rescoring shared by the contract tests."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
import toys
from torch import Tensor

from tastemaker.core.policy import Guidance, Policy
from tastemaker.core.randomness import Randomness
from tastemaker.core.types import Condition, Trajectory

GUIDED = Guidance(scale=2.0, interval=(0.2, 0.9))
KINDS = [(name, guidance) for name in toys.GENERATORS for guidance in (None, GUIDED)]
ROWS = 8
LIKE_OTHERS = (*toys.SIMILAR, "sdxl", "videocrafter")  # which are built as sd15 and modelscope are


def tier(name: str, guidance: Guidance | None) -> list[pytest.MarkDecorator]:
    like = name in LIKE_OTHERS
    if name in toys.FAMILIES or (guidance is None and not like):
        return []
    return [pytest.mark.long if guidance and like else pytest.mark.slow]


def kinds(*, gaussian: bool = False) -> list[Any]:
    """All generators, plain and guided, as parameters of a test.

    The fast set has every toy family both ways and every kind of published network once, unguided. Guidance wraps any
    backbone alike, and networks like those of others differ in what tests/models holds against diffusers: both are
    slow, and together long.
    """
    return [
        pytest.param(
            kind,
            id=kind[0] if kind[1] is None else f"{kind[0]}-guided",
            marks=tier(*kind),
        )
        for kind in KINDS
        if not gaussian or toys.GENERATORS[kind[0]].gaussian
    ]


@cache
def built(name: str, guidance: Guidance | None) -> Policy[Any]:
    """The generator of one kind, built once a process; tests leave its weights, hooks and gradients as they were."""
    return toys.policy(name, guidance=guidance)


@cache
@torch.no_grad()
def recorded(name: str, guidance: Guidance | None) -> Trajectory:
    """What it samples for `asked` with `rows`, once a process."""
    return sample_rollout(built(name, guidance))


def prompts_for(policy: Policy[Any]) -> Condition:
    return policy.embed(toys.PROMPTS * 2, [{"number": i} for i in range(ROWS)])


def rows(*numbers: int) -> Randomness:
    return Randomness(0, 0, torch.tensor(numbers or range(ROWS)))


def sample_rollout(policy: Policy[Any]) -> Trajectory:
    return policy.sample(prompts_for(policy), rows())


def rescore(policy: Policy[Any], seen: Trajectory) -> list[tuple[Tensor, Tensor]]:
    """Log-probabilities now and then, of the decisions that were taken."""
    pairs = []
    for segment in seen.segments:
        now = policy.action_distribution(seen.cond, segment).log_prob(segment.action)
        taken = segment.mask > 0
        pairs.append((now[taken], segment.log_prob[taken]))
    return pairs
