"""NormGuard on each objective that has it: the penalty by its formula, and none where norms have not grown."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
import toys
from torch import Tensor

from tastemaker.core.policy import Policy
from tastemaker.core.types import Condition, Corrupted
from tastemaker.core.weights import FrozenCopyFinetuning
from tastemaker.objectives.dpo import DPO, corrupt_pair
from tastemaker.objectives.nft import NFT
from tastemaker.objectives.online_dpo import OnlineDPO

COEF = 3.0


def velocity_norm(policy: Policy[Any], cond: Condition, noisy: Corrupted, snapshot: str | None) -> Tensor:
    """Root mean square of predicted noise minus predicted clean sample: [B]."""
    with policy.weights.use(snapshot) if snapshot else nullcontext():
        output = policy.model.predict(noisy.x, noisy.t, cond).double()
    path, shape = policy.process.path, (-1, *[1] * (noisy.x.ndim - 1))
    alpha, sigma = path.alpha(noisy.t).view(shape).double(), path.sigma(noisy.t).view(shape).double()
    clean = path.clean(noisy.x, noisy.t, output.float()).double()
    velocity = (noisy.x - alpha * clean) / sigma - clean
    return velocity.square().flatten(1).mean(1).sqrt()


def corruptions(objective: Any, policy: Policy[Any], experience: Any) -> list[Corrupted]:
    if isinstance(objective, NFT):
        return [policy.corrupt(experience.trajectory.final, experience.rng)]
    return list(corrupt_pair(policy, experience, objective.noise_sharing, 0))


@pytest.mark.parametrize("name", ["flow", "epsilon"])
@pytest.mark.parametrize(
    "objective",
    [NFT(group_size=4, num_timesteps=1, kl_coef=0.0), DPO(noise_sharing="independent"), OnlineDPO()],
    ids=lambda objective: type(objective).__name__,
)
def test_penalty_is_the_squared_excess_over_the_references_norm(objective: Any, name: str) -> None:
    guarded = replace(objective, norm_guard_coef=COEF)
    policy = toys.policy(name, FrozenCopyFinetuning(), guarded.snapshots())
    ctx = toys.context(policy, 8)
    experience = guarded.collect(ctx, toys.make_batch(guarded, 8, policy.model.pixels))
    noisy = corruptions(guarded, policy, experience)
    cond = experience.trajectory.cond if isinstance(objective, NFT) else experience.cond
    at_start = guarded.loss(ctx, experience, 0)
    torch.testing.assert_close(at_start.rows, objective.loss(ctx, experience, 0).rows, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(at_start.metrics["velocity_norm_ratio"].double(), torch.ones(len(experience)).double())
    signs = set()
    for growth in (0.02, -0.04):
        with torch.no_grad():
            for p in policy.weights.trainable().values():
                p.mul_(1 + growth)
        norms = [[velocity_norm(policy, cond, each, snapshot) for each in noisy] for snapshot in (None, "reference")]
        excess = [(live - reference).clamp(min=0) ** 2 for live, reference in zip(*norms, strict=True)]
        ratio = torch.stack([live / reference for live, reference in zip(*norms, strict=True)]).mean(0)
        expected = COEF * torch.stack(excess).mean(0)
        loss, plain = guarded.loss(ctx, experience, 0), objective.loss(ctx, experience, 0)
        penalty = loss.rows.double() - plain.rows.double()
        scale = float(plain.rows.detach().abs().max())
        torch.testing.assert_close(penalty, expected, rtol=1e-2, atol=2e-6 * scale + 1e-9)
        torch.testing.assert_close(loss.metrics["velocity_norm_ratio"].double(), ratio.detach(), rtol=1e-4, atol=0)
        if float(expected.detach().max()):
            actual, full = (toys.gradient(policy, value.sum()) for value in (penalty, expected))
            torch.testing.assert_close(actual, full, rtol=1e-2, atol=1e-2 * float(full.abs().max()))
        signs |= set((expected > 0).tolist())
    assert signs == {True, False}


@pytest.mark.parametrize("kind", [DPO, OnlineDPO])
def test_tokens_have_no_velocity(kind: Any) -> None:
    for name in ("causal", "masked"):
        process = toys.FAMILIES[name].process
        assert kind().find_problem(process, (1,)) is None
        assert "TM1543" in str(kind(norm_guard_coef=1.0).find_problem(process, (1,)))


def test_norm_guard_keeps_the_reference_and_refuses_negative_weights() -> None:
    assert NFT(kl_coef=0.0).snapshots() == ("old",)
    assert NFT(kl_coef=0.0, norm_guard_coef=1.0).snapshots() == ("old", "reference")
    for kind in (NFT, DPO, OnlineDPO):
        with pytest.raises(ValueError, match=r"norm_guard_coef.*TM088"):
            kind(norm_guard_coef=-1.0)
