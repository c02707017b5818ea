"""RAM: recorded values, the closed form of a Gaussian, precision of the target and the old policy."""

from __future__ import annotations

import pytest
import torch
import toys
from golden_cases import assert_golden, load_cases

from tastemaker.core.policy import Guidance
from tastemaker.core.types import select_rows
from tastemaker.objectives.advantages import group_advantages
from tastemaker.objectives.ram import RAM

CASES = load_cases("ram")


@pytest.mark.parametrize("name", CASES)
def test_losses_and_gradients_match_recorded_values(name: str) -> None:
    case = CASES[name]
    objective, x = RAM(**case.config), case.inputs
    assert_golden(objective.timesteps(x["uniform"]), x["t"])
    velocity = x["v"].clone().requires_grad_()
    rows = []
    for j, t in enumerate(x["t"]):
        level = t.view(-1, 1, 1, 1)
        noisy = (1 - level) * x["x0"] + level * x["noise"][j]
        old, reference = (noisy - level * x[key][j] for key in ("v_old", "v_ref"))
        baseline = old if objective.baseline == "old" else None
        prediction = noisy - level * velocity[j]
        rows.append(objective.sample_losses(prediction, x["x0"], t, reference, baseline, x["advantage"])[0])
    mean = torch.stack(rows).mean(0)
    assert_golden(mean.detach(), case.outputs["rows"])
    assert_golden(mean.mean().detach(), case.outputs["loss"])
    (gradient,) = torch.autograd.grad(mean.mean(), velocity)
    assert_golden(gradient, case.outputs["grad_v"])


def gaussian_velocity(x: torch.Tensor, t: torch.Tensor, mean: float, std: float) -> torch.Tensor:
    """E[noise - x0 | x_t = x] for x0 ~ N(mean, std^2) on the straight path."""
    variance = (1 - t) ** 2 * std**2 + t**2
    clean = mean + (1 - t) * std**2 / variance * (x - (1 - t) * mean)
    return (x - clean) / t


@pytest.mark.parametrize("t", [0.3, 0.8])
def test_best_fit_is_the_kl_regularized_optimum_of_a_gaussian(t: float) -> None:
    """Reference N(-1, .8^2), a linear reward: the optimum is the same Gaussian, moved by m std.

    The sampling policy has already moved by half of it; the target is then the optimum of the reference's tilt.
    """
    std, multiplier, moved = 0.8, 0.5, -1 + 0.2
    generator = torch.Generator().manual_seed(0)
    clean, noise = torch.randn(2, 400_000, generator=generator, dtype=torch.float64)
    clean = moved + std * clean
    level = torch.full_like(clean, t)
    x = (1 - t) * clean + t * noise
    advantage = group_advantages(clean, len(clean), eps=0.0)  # the reward is x0: one large group
    reference, old, optimum = (
        x - t * gaussian_velocity(x, level, mean, std) for mean in (-1.0, moved, -1 + multiplier * std)
    )
    prediction = optimum.clone().requires_grad_()
    rows, _ = RAM(reward_multiplier=multiplier).sample_losses(
        prediction.view(-1, 1), clean.view(-1, 1), level, reference.view(-1, 1), old.view(-1, 1), advantage
    )
    (gradient,) = torch.autograd.grad(rows.sum(), prediction)
    # At the best fit the gradient averages to zero for all x alike: here its mean, and its slope in x.
    features = torch.stack([torch.ones_like(x), (x - x.mean()) / x.std()])
    error = gradient.std() / len(x) ** 0.5
    assert ((features * gradient).mean(1).abs() < 4 * error).all()
    at_reference = reference.clone().requires_grad_()
    rows, _ = RAM(reward_multiplier=multiplier).sample_losses(
        at_reference.view(-1, 1), clean.view(-1, 1), level, reference.view(-1, 1), old.view(-1, 1), advantage
    )
    (gradient,) = torch.autograd.grad(rows.sum(), at_reference)
    assert gradient.mean().abs() > 20 * error


def test_target_keeps_the_reference_beside_large_advantages() -> None:
    """With m A of 1000 a target in bfloat16 would lose the reference's share, which is all that holds the policy."""
    generator = torch.Generator().manual_seed(1)
    prediction, clean, reference, old = torch.randn(4, 2, 16, generator=generator)
    level, advantage = torch.ones(2), torch.tensor([1.0, -1.0])
    rows, metrics = RAM(reward_multiplier=1000.0).sample_losses(prediction, clean, level, reference, old, advantage)
    moved, _ = RAM(reward_multiplier=1000.0).sample_losses(
        prediction + 1e-3, clean, level, reference + 1e-3, old, advantage
    )
    torch.testing.assert_close(moved, rows, rtol=1e-9, atol=0)
    torch.testing.assert_close(metrics["kl"], ((prediction - reference).double() ** 2).mean(1))


def test_ram_trains_without_guidance_and_pulls_only_where_rewards_are_equal() -> None:
    objective = RAM(group_size=4, num_timesteps=2)
    policy = toys.policy("flow", snapshots=objective.snapshots(), guidance=Guidance(3.0))
    calls: list[int] = []
    policy.model.net.register_forward_hook(lambda net, inputs, output: calls.append(len(output)))
    ctx = toys.context(policy, 4)
    experience = objective.collect(ctx, toys.prompts(4))
    assert set(calls) == {32}  # the rollout has both branches
    calls.clear()
    toys.perturb(policy, 0.01)
    loss = objective.loss(ctx, experience, 0)
    assert calls == [16] * 3
    equal = select_rows(experience, torch.arange(16))
    object.__setattr__(equal, "advantage", torch.zeros(16))
    pull = objective.loss(ctx, equal, 0)
    torch.testing.assert_close(pull.rows * 2, loss.metrics["kl"])
    policy.weights.update_snapshot("old")  # the pull is to the reference, wherever the sampling policy is
    torch.testing.assert_close(objective.loss(ctx, equal, 0).rows, pull.rows)
    assert pull.rows.gt(0).all()


def test_ram_old_policy_follows_the_published_schedule() -> None:
    objective = RAM()
    policy = toys.policy("flow", snapshots=objective.snapshots())
    start = {key: x.clone() for key, x in policy.weights.snapshot_tensors()["old"].items()}
    toys.perturb(policy, 0.01)
    live = {key: p.detach().clone() for key, p in policy.weights.trainable().items()}
    objective.after_update(toys.context(policy, 8, step=200))
    for key, x in policy.weights.snapshot_tensors()["old"].items():
        torch.testing.assert_close(x, 0.9 * start[key] + 0.1 * live[key], rtol=1e-5, atol=1e-6)
    objective.after_update(toys.context(policy, 8, step=0))
    assert all(torch.equal(x, live[key]) for key, x in policy.weights.snapshot_tensors()["old"].items())
