"""DiffusionNFT: first gradient, KL term and decay of the old policy."""

from __future__ import annotations

import pytest
import torch
import toys

from tastemaker.core.types import select_rows
from tastemaker.objectives.nft import NFT


@pytest.mark.parametrize("name", ["flow", "epsilon", "video"])
def test_first_nft_gradient_follows_positive_weight(name: str) -> None:
    """If live and old weights are equal, the gradient is that of the squared error, times 2 * positive_weight - 1."""
    objective = NFT(group_size=4, num_timesteps=1, kl_coef=0.0, beta=0.5)
    policy = toys.policy(name, snapshots=objective.snapshots())
    ctx = toys.context(policy, 8)
    experience = objective.collect(ctx, toys.prompts(8))
    clean, positive_weight = experience.trajectory.final, experience.advantage / (2 * objective.advantage_clip) + 0.5
    noisy = policy.corrupt(clean, experience.rng)
    for row in (int(positive_weight.argmax()), int(positive_weight.argmin())):
        sample = select_rows(experience, torch.tensor([row]))
        prediction = policy.restore(sample.trajectory.cond, select_rows(noisy, torch.tensor([row]))).mean
        error, scale = (prediction - clean[row]).pow(2).mean(), (prediction - clean[row]).abs().mean().detach()
        expected = objective.advantage_clip * (2 * positive_weight[row] - 1) / scale * toys.gradient(policy, error)
        gradient = toys.gradient(policy, objective.loss(ctx, sample, 0).rows.sum())
        torch.testing.assert_close(gradient, expected, rtol=1e-2, atol=1e-3 * float(expected.abs().max()))


def test_nft_old_policy_decay_matches_published() -> None:
    objective = NFT()
    policy = toys.policy("flow", snapshots=objective.snapshots())
    start = {key: x.clone() for key, x in policy.weights.snapshot_tensors()["old"].items()}
    toys.perturb(policy, 0.01)
    live = {key: p.detach().clone() for key, p in policy.weights.trainable().items()}
    objective.after_update(toys.context(policy, 8, step=200))
    for key, x in policy.weights.snapshot_tensors()["old"].items():
        torch.testing.assert_close(x, 0.2 * start[key] + 0.8 * live[key], rtol=1e-5, atol=1e-6)
    objective.after_update(toys.context(policy, 8, step=0))
    assert all(torch.equal(x, live[key]) for key, x in policy.weights.snapshot_tensors()["old"].items())


def test_nft_kl_is_squared_distance_of_outputs() -> None:
    with_kl, plain = NFT(group_size=4, num_timesteps=1, kl_coef=0.5), NFT(group_size=4, num_timesteps=1, kl_coef=0.0)
    for name in ("flow", "epsilon"):
        ctx, experience = toys.policy_with_experience(with_kl, name)
        policy, cond = ctx.policy, experience.trajectory.cond
        noisy = policy.corrupt(experience.trajectory.final, experience.rng)
        with policy.weights.use("reference"):
            reference = policy.model.predict(noisy.x, noisy.t, cond)
        squared_distance = (policy.model.predict(noisy.x, noisy.t, cond) - reference).pow(2).flatten(1).mean(1)
        kl_term = toys.total_loss(with_kl, ctx, experience) - toys.total_loss(plain, ctx, experience)
        torch.testing.assert_close(kl_term, 0.5 * squared_distance, rtol=2e-2, atol=1e-4)
