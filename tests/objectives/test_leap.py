"""LeapAlign: gradient of the two leaps, saved tensors, and the steps that it reaches."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import pytest
import torch
import toys
from torch import Tensor, nn

from tastemaker.config.check import find_problems
from tastemaker.config.load import load
from tastemaker.core.policy import Backbone, Policy
from tastemaker.core.randomness import Randomness
from tastemaker.core.reward import Reward, RewardCard, RewardSpec
from tastemaker.core.types import Condition, Metadata, Placement, Prompts
from tastemaker.core.weights import FullWeights
from tastemaker.objectives.reward_gradient import RewardGradient
from tastemaker.processes.dynamics import ODE, FlowSDE
from tastemaker.processes.gaussian import GaussianProcess
from tastemaker.processes.paths import RectifiedFlow

LEAP = RewardGradient(gradient_mode="leap")


class LinearVelocity(nn.Module):
    """v(x, t) = slope * x + offset."""

    def __init__(self) -> None:
        super().__init__()
        self.slope, self.offset = nn.Parameter(torch.tensor(0.7)), nn.Parameter(torch.tensor(-0.4))

    def forward(self, x: Tensor) -> Tensor:
        return self.slope * x + self.offset


class LinearBackbone(Backbone):
    shape, pixels, forward_passes = (1, 3, 2, 2), (1, 3, 2, 2), 1

    def __init__(self) -> None:
        self.net = LinearVelocity()

    def embed(self, prompts: Prompts, metadata: Sequence[Metadata] = ()) -> Condition:
        return Condition(tuple(prompts), {}, tuple(metadata))

    def predict(self, x: Tensor, t: Tensor, cond: Condition) -> Tensor:
        velocity: Tensor = self.net(x)
        return velocity

    def encode(self, pixels: Tensor) -> Tensor:
        return pixels

    def decode(self, x: Tensor, frames: Sequence[int] | None = None) -> Tensor:
        return x


@dataclass(frozen=True)
class SumReward(RewardSpec, Reward):
    """The sum of all pixels, whose gradient is 1."""

    batch_size: int = 1000
    card: ClassVar[RewardCard] = RewardCard(range="any", failure_modes="anything")
    differentiable = True
    modality = "video"
    runs_on = "device"

    def load(self, placement: Placement) -> SumReward:
        return self

    def tiny(self) -> SumReward:
        return self

    def score(self, pixels: Tensor, prompts: Prompts, metadata: Sequence[Metadata]) -> Tensor:
        return pixels.flatten(1).sum(1)


def linear_policy(num_steps: int) -> Policy[Any]:
    model = LinearBackbone()
    return Policy(model, GaussianProcess(RectifiedFlow(), ODE(), num_steps), FullWeights(model.net))


@pytest.mark.parametrize("step", range(6))
def test_leap_gradient_equals_the_formula_on_a_linear_network(step: int) -> None:
    """With v = a x + b the derivatives of both leaps are written down: x_k and x_j are constants of the rollout."""
    objective = replace(LEAP, leap_discount=0.3, leap_error_floor=0.05, reward_threshold=30.0)
    policy = linear_policy(num_steps=5)
    ctx = toys.context(policy, 4, step=step, spec=SumReward())
    experience = objective.collect(ctx, toys.prompts(4))
    k, j = objective.leap_steps(experience.rng, 5)
    rollout = policy.rollout(experience.cond, experience.rng)
    states = [rollout.x.double()]
    with torch.no_grad():
        while rollout.progress < 1:
            rollout.step()
            states.append(rollout.x.double())
    sigma, a, b, alpha = torch.linspace(1, 0, 6).double(), 0.7, -0.4, objective.leap_discount
    x_k, x_j, x_end = states[k], states[j], states[-1]
    p_j = x_k + (sigma[j] - sigma[k]) * (a * x_k + b)
    p_0 = x_j - sigma[j] * (a * x_j + b)
    errors = [(x_j - p_j).abs().flatten(1).mean(1), (x_end - p_0).abs().flatten(1).mean(1)]
    weight = 1 / sum(error.clamp(min=0.05) for error in errors)
    middle_slope, middle_offset = (sigma[j] - sigma[k]) * x_k, (sigma[j] - sigma[k]) * torch.ones_like(x_k)
    final_slope = middle_slope - sigma[j] * (x_j + a * alpha * middle_slope)
    final_offset = middle_offset - sigma[j] * (1 + a * alpha * middle_offset)
    reward = x_end.flatten(1).sum(1)
    assert (reward < 30).all()
    loss = objective.loss(ctx, experience, 0)
    torch.testing.assert_close(loss.rows.double(), weight * (30 - reward), rtol=1e-5, atol=1e-5)
    expected = torch.stack([-(weight * d.flatten(1).sum(1)).sum() for d in (final_slope, final_offset)])
    gradient = toys.gradient(policy, loss.rows.sum()).double()
    torch.testing.assert_close(gradient, expected, rtol=1e-5, atol=1e-4)


def saved_elements(objective: RewardGradient, num_steps: int) -> list[int]:
    """Sizes of the tensors that autograd keeps for the backward pass of one loss."""
    policy = replace(toys.policy("flow"), process=GaussianProcess(RectifiedFlow(), ODE(), num_steps))
    ctx, sizes = toys.context(policy, 4), list[int]()
    experience = objective.collect(ctx, toys.prompts(4))

    def record(x: Tensor) -> Tensor:
        sizes.append(x.numel())
        return x

    with torch.autograd.graph.saved_tensors_hooks(record, lambda x: x):
        objective.loss(ctx, experience, 0)
    return sizes


def test_leap_saves_as_many_tensors_for_fifty_steps_as_for_two() -> None:
    sizes = {num_steps: saved_elements(LEAP, num_steps) for num_steps in (2, 8, 50)}
    assert sizes[2] == sizes[8] == sizes[50]
    through_all_steps = [len(saved_elements(RewardGradient(last_steps=n), n)) for n in (2, 8)]
    assert len(sizes[50]) < 1.2 * through_all_steps[0] < 0.5 * through_all_steps[1]


def test_leap_draws_all_pairs_of_steps_alike_and_the_same_on_all_ranks() -> None:
    draws = [LEAP.leap_steps(Randomness(0, step, torch.arange(4)), 4) for step in range(1200)]
    assert draws == [LEAP.leap_steps(Randomness(0, step, torch.arange(4) + 4), 4) for step in range(1200)]
    counts = Counter(draws)
    assert set(counts) == {(k, j) for k in range(4) for j in range(k + 1, 4)}
    assert all(140 < count < 260 for count in counts.values())  # 200 of each are expected
    assert LEAP.leap_steps(Randomness(0, 0, torch.arange(4)), 50, draw=0) != LEAP.leap_steps(
        Randomness(0, 0, torch.arange(4)), 50, draw=1
    )


def test_leap_scores_the_samples_of_the_ode() -> None:
    """The connectors keep the values of the trajectory, also if rollouts elsewhere are stochastic."""
    policy = replace(toys.policy("flow"), process=GaussianProcess(RectifiedFlow(), FlowSDE(0.7), 8))
    ctx = toys.context(policy, 8)
    experience = LEAP.collect(ctx, toys.prompts(8))
    deterministic = replace(policy, process=GaussianProcess(RectifiedFlow(), ODE(), 8))
    samples = deterministic.decode(deterministic.sample(experience.cond, experience.rng).final)
    expected = ctx.rubric.score(samples, experience.cond.prompts).total
    torch.testing.assert_close(LEAP.loss(ctx, experience, 0).metrics["reward/mean"], expected, rtol=1e-4, atol=1e-5)


def test_leap_needs_two_steps_and_the_same_guidance_in_both_passes() -> None:
    (problem,) = find_problems(load("leap-toy-flow", ["process.num_steps=1"]), world_size=1)
    assert "process.num_steps" in problem and "TM1560" in problem
    guidance = "guidance={scale: 2.0, rollouts_only: true}"
    (problem,) = find_problems(load("leap-toy-flow", [guidance]), world_size=1)
    assert "guidance.rollouts_only" in problem and "TM1561" in problem
