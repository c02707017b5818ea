"""A run under examination: gather, differentiate, nudge, and put everything back."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ..objective import Context
from ..policy import Policy
from ..randomness import Randomness
from ..train.run import AnyObjective, Run
from ..types import Trajectory

STEP = 0  # whose batch and draws are examined


def context(run: Run) -> Context[Any]:
    return run.context(STEP, run.batch.prompts // run.engine.rows.world)


def gather(run: Run) -> tuple[Context[Any], Any]:
    """The first step's experience."""
    ctx = context(run)
    with run.engine.computing():
        batch = run.data.batch(STEP, run.batch.prompts, run.engine.rows.rank, run.engine.rows.world)
        return ctx, run.objective.collect(ctx, batch)


def gradients(run: Run, objective: AnyObjective, ctx: Context[Any], experience: Any) -> dict[str, Tensor]:
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
def nudged(run: Run, size: float) -> Iterator[None]:
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


def sample(run: Run, count: int) -> Trajectory:
    """Samples of the first prompts, always from the same noise."""
    with run.engine.computing():
        return drawn(run, count, run.policy)


def drawn(run: Run, count: int, policy: Policy[Any]) -> Trajectory:
    """The same of any policy, in whatever precision the caller computes."""
    first = run.data.first(count)
    rng = Randomness(run.seed, STEP, torch.arange(len(first), device=run.engine.device))
    return policy.sample(policy.embed(first.prompts, first.facts), rng)
