"""Helpers of the checks: collect experience, compute gradients, perturb weights and restore them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ..core.objective import Context
from ..core.policy import Policy
from ..core.randomness import Randomness
from ..core.types import Trajectory
from ..training.run import AnyObjective, Run

STEP = 0  # whose batch and draws are examined


def first_context(run: Run) -> Context[Any]:
    return run.context(STEP, run.batch.prompts // run.engine.rows.world)


def collect_experience(run: Run) -> tuple[Context[Any], Any]:
    """The first step's experience."""
    ctx = first_context(run)
    with run.engine.computing():
        batch = run.data.batch(STEP, run.batch.prompts, run.engine.rows.rank, run.engine.rows.world)
        return ctx, run.objective.collect(ctx, batch)


def compute_gradients(run: Run, objective: AnyObjective, ctx: Context[Any], experience: Any) -> dict[str, Tensor]:
    """Of the whole objective with respect to every trainable tensor, on this rank."""
    parameters = run.policy.weights.trainable()
    for part in objective.parts(experience):
        with run.engine.computing(), run.engine.keeping():
            loss = objective.loss(ctx, experience, part)
        if loss.rows.requires_grad:
            torch.autograd.backward(loss.rows.sum() / len(experience))
    found = {key: torch.zeros_like(p) if p.grad is None else p.grad for key, p in parameters.items()}
    for p in parameters.values():
        p.grad = None
    return found


@contextmanager
def perturb_weights(run: Run, size: float) -> Iterator[None]:
    """Move every trainable tensor a little, for a fresh adapter's second factor is zero and the reference is equal."""
    parameters = run.policy.weights.trainable()
    before = {key: p.detach().clone() for key, p in parameters.items()}
    with torch.no_grad():
        for key, p in parameters.items():
            rng = Randomness(run.seed, STEP, torch.zeros(1, dtype=torch.int64, device=p.device))
            p.add_(size * rng.normal(f"nudge {key}", *p.shape)[0].to(p.dtype))
    try:
        yield
    finally:
        with torch.no_grad():
            for key, p in parameters.items():
                p.copy_(before[key])


def sample_fixed_prompts(run: Run, count: int) -> Trajectory:
    """Samples of the first prompts, always from the same noise."""
    with run.engine.computing():
        return sample_with_policy(run, count, run.policy)


def sample_with_policy(run: Run, count: int, policy: Policy[Any]) -> Trajectory:
    """Sample the first prompts with any policy, in the caller's precision."""
    first = run.data.first(count)
    rng = Randomness(run.seed, STEP, torch.arange(len(first), device=run.engine.device))
    return policy.sample(policy.embed(first.prompts, first.facts), rng)
