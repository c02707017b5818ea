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
CASES = [(name, guidance) for name in toys.GENERATORS for guidance in (None, GUIDED)]
BATCH_SIZE = 8
SIMILAR = (*toys.SIMILAR, "sdxl", "videocrafter")  # share their code with sd15 and modelscope


def tier(name: str, guidance: Guidance | None) -> list[pytest.MarkDecorator]:
    similar = name in SIMILAR
    if name in toys.FAMILIES or (guidance is None and not similar):
        return []
    return [pytest.mark.long if guidance and similar else pytest.mark.slow]


def generator_params(*, gaussian: bool = False) -> list[Any]:
    """Test parameters: all generators, with and without guidance.

    The fast set has every toy family both ways and every published architecture once, unguided. Guidance wraps all
    backbones alike, and tests/models compares architectures that share code with diffusers: either alone is marked
    slow, both together long.
    """
    return [
        pytest.param(
            kind,
            id=kind[0] if kind[1] is None else f"{kind[0]}-guided",
            marks=tier(*kind),
        )
        for kind in CASES
        if not gaussian or toys.GENERATORS[kind[0]].gaussian
    ]


@cache
def cached_policy(name: str, guidance: Guidance | None) -> Policy[Any]:
    """Build a generator once per process. Tests must leave its weights, hooks and gradients unchanged."""
    return toys.policy(name, guidance=guidance)


@cache
@torch.no_grad()
def cached_rollout(name: str, guidance: Guidance | None) -> Trajectory:
    """Sample a generator's rollout of `prompts_for` with `make_rng`, once per process."""
    return sample_rollout(cached_policy(name, guidance))


def prompts_for(policy: Policy[Any]) -> Condition:
    return policy.embed(toys.PROMPTS * 2, [{"number": i} for i in range(BATCH_SIZE)])


def make_rng(*numbers: int) -> Randomness:
    return Randomness(0, 0, torch.tensor(numbers or range(BATCH_SIZE)))


def sample_rollout(policy: Policy[Any]) -> Trajectory:
    return policy.sample(prompts_for(policy), make_rng())


def rescore(policy: Policy[Any], rollout: Trajectory) -> list[tuple[Tensor, Tensor]]:
    """Pairs of current and recorded log-probabilities of the sampled actions, one per segment."""
    pairs = []
    for segment in rollout.segments:
        current = policy.action_distribution(rollout.cond, segment).log_prob(segment.action)
        sampled = segment.mask > 0
        pairs.append((current[sampled], segment.log_prob[sampled]))
    return pairs
