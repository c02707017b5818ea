"""ReNO: gradient steps on the initial noise."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import toys
from exact_denoiser import FunctionVerifier, exact_policy, numbered_prompts
from torch import Tensor

from tastemaker.core.randomness import Purpose, Randomness
from tastemaker.core.registry import ConfigError
from tastemaker.processes.dynamics import ODE, FlowSDE
from tastemaker.processes.gaussian import GaussianProcess
from tastemaker.search.base import RubricVerifier
from tastemaker.search.best_of_n import BestOfN
from tastemaker.search.reno import ReNO, norm_penalty

PROCESS = GaussianProcess(dynamics=ODE(), num_steps=3)


def reward(x: Tensor) -> Tensor:
    return -((x - 2) ** 2)


def test_iterates_are_those_of_sgd_with_nesterov_momentum() -> None:
    policy, rng = exact_policy(PROCESS), Randomness(4, 0, torch.arange(1))
    scores: list[float] = []

    def recorded(x: Tensor) -> Tensor:
        scores.append(float(reward(x.detach())))
        return reward(x)

    ReNO(6, lr=0.5, momentum=0.8, max_grad_norm=0.3, norm_coef=0.2).run(
        policy, FunctionVerifier(recorded), numbered_prompts(1), rng
    )
    noise = rng.normal(Purpose.INITIAL_NOISE, *policy.model.shape).requires_grad_()
    optimizer, expected = torch.optim.SGD([noise], 0.5, 0.8, nesterov=True), []
    for _ in range(6):
        rollout = policy.rollout(policy.embed([""]), rng)
        rollout.set_start(noise)
        score = reward(rollout.finish().final.flatten())
        expected.append(float(score.detach()))
        optimizer.zero_grad()
        (0.2 * noise.square().sum() / 2 - score.sum()).backward()
        torch.nn.utils.clip_grad_norm_([noise], 0.3)
        optimizer.step()
    assert scores == pytest.approx(expected, rel=1e-4, abs=1e-5)
    assert expected[-1] > expected[0]


def test_norm_penalty_is_least_at_the_typical_norm() -> None:
    noise = torch.ones(3, 2, 50) * torch.tensor([0.9, 1.0, 1.1]).view(3, 1, 1) * (99 / 100) ** 0.5
    penalty = norm_penalty(noise)
    assert penalty.argmin() == 1 and penalty.shape == (3,)


def test_best_iterate_is_returned_at_the_stated_cost_and_the_ode_is_followed() -> None:
    batch, rng = numbered_prompts(8), Randomness(1, 0, torch.arange(8))
    policy, verifier = exact_policy(replace(PROCESS, dynamics=FlowSDE())), FunctionVerifier(reward)
    result = ReNO(10, lr=2.0).run(policy, verifier, batch, rng)
    torch.testing.assert_close(result.score, reward(result.x.flatten()))
    single = BestOfN(1).run(exact_policy(PROCESS), FunctionVerifier(reward), batch, rng)
    assert (result.score > single.score).all() and not result.x.requires_grad
    assert result.cost.calls == policy.model.predictions == 10 * 8 * 3  # type: ignore[attr-defined]
    assert result.cost.verifier_calls == sum(count for _, count in verifier.calls) == 80
    parts = [
        ReNO(10, lr=2.0).run(policy, verifier, numbered_prompts(4), Randomness(1, 0, torch.arange(4) + k))
        for k in (0, 4)
    ]
    torch.testing.assert_close(torch.cat([part.x for part in parts]), result.x)


def test_rewards_without_gradient_tokens_and_impossible_settings_are_refused() -> None:
    batch, rng = numbered_prompts(4), Randomness(1, 0, torch.arange(4))
    with pytest.raises(ConfigError, match=r"gradient.*--verifier.*TM1630"):
        ReNO(2).run(exact_policy(PROCESS), FunctionVerifier(lambda x: x.detach()), batch, rng)
    with pytest.raises(ConfigError, match="TM1620"):
        ReNO(2).run(toys.policy("masked"), RubricVerifier(toys.rubric()), toys.prompts(4), rng)
    for settings in ({"iterations": 0}, {"lr": 0.0}, {"momentum": 1.0}, {"max_grad_norm": -1.0}):
        with pytest.raises(ValueError, match="TM1629"):
            ReNO(**settings)  # type: ignore[arg-type]
