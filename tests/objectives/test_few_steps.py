"""Models that sample in one to eight steps: rollouts, gradients of every method, and learning in four steps."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import toys
from tiers import fast

from tastemaker.config.check import find_problems
from tastemaker.config.config_warnings import collect_warnings
from tastemaker.config.load import load
from tastemaker.core.objective import Objective
from tastemaker.core.policy import Policy
from tastemaker.core.weights import FrozenCopyFinetuning
from tastemaker.objectives.grpo import GRPO
from tastemaker.objectives.nft import NFT
from tastemaker.objectives.reward_gradient import RewardGradient
from tastemaker.processes.dynamics import CPS, ConsistencySampling, FlowSDE, SamplerDynamics
from tastemaker.processes.gaussian import GaussianProcess, SDEWindow
from tastemaker.processes.paths import RectifiedFlow

STEPS = (1, 2, 4, 8)
GRPO_4, NFT_4 = GRPO(group_size=4, clip_range=1e-3), NFT(group_size=4, kl_coef=0.0, levels="sampler")


def few_step_policy(name: str, steps: int, objective: Objective[Any, Any, Any, Any], **settings: Any) -> Policy[Any]:
    policy = toys.policy(name, FrozenCopyFinetuning(), objective.snapshots())
    return replace(policy, process=replace(policy.process, num_steps=steps, **settings))


def gradient_of(policy: Policy[Any], objective: Objective[Any, Any, Any, Any]) -> tuple[torch.Tensor, Any]:
    """The gradient of all parts, and the experience, of eight samples."""
    ctx = toys.context(policy, 8, objective.make_state())
    experience = objective.collect(ctx, toys.prompts(8))
    toys.perturb(policy, 0.01)  # a policy that equals its old version has no gradient
    return toys.gradient(policy, toys.total_loss(objective, ctx, experience).sum()), experience


@pytest.mark.parametrize("dynamics", [FlowSDE(0.7), CPS(0.8), ConsistencySampling()], ids=lambda d: type(d).__name__)
def test_all_steps_but_the_last_are_actions(dynamics: SamplerDynamics) -> None:
    for steps in STEPS:
        policy = few_step_policy("flow", steps, GRPO_4, path=RectifiedFlow(3.0), dynamics=dynamics)
        cond = policy.embed(toys.PROMPTS)
        trajectory = policy.sample(cond, toys.context(policy, 4).rng)
        assert trajectory.final.isfinite().all() and len(trajectory.segments) == steps - 1
        for segment in trajectory.segments:
            assert bool((policy.process.action_std(segment) > 0).all())
            log_prob = policy.action_distribution(cond, segment).log_prob(segment.action)
            torch.testing.assert_close(log_prob, segment.log_prob, atol=1e-6, rtol=1e-6)


def test_window_of_one_step_fits_two_steps() -> None:
    policy = few_step_policy("flow", 2, GRPO_4, window=SDEWindow(1))
    assert len(policy.sample(policy.embed(toys.PROMPTS), toys.context(policy, 4).rng).segments) == 1
    with pytest.raises(ValueError, match=r"TM332"):
        GaussianProcess(num_steps=1, window=SDEWindow(1))


# FLUX is schnell, FLUX.2 klein and Z-Image Turbo here: no guidance input, as published.
@pytest.mark.parametrize("name", fast(["flow", "flux", "flux2", "sana_sprint", "z_image"], "flow"))
@pytest.mark.parametrize("objective", [GRPO_4, NFT_4, RewardGradient()], ids=lambda o: type(o).__name__)
def test_every_number_of_steps_has_a_gradient(name: str, objective: Objective[Any, Any, Any, Any]) -> None:
    for steps in STEPS if name == "flow" else STEPS[:3]:
        policy = few_step_policy(name, steps, objective)
        if steps == 1 and isinstance(objective, GRPO):
            continue  # refused, see below
        gradient, _ = gradient_of(policy, objective)
        assert gradient.isfinite().all() and bool(gradient.any()), steps


def test_reward_gradient_of_one_step_is_that_of_the_whole_sampler() -> None:
    """With one step, last_steps 1 and from_step 0 are the same, and reach all weights that the sample depends on."""
    last, first = RewardGradient(last_steps=1), RewardGradient(gradient_mode="from_step", from_step=0)
    gradients = [gradient_of(few_step_policy("flow", 1, each), each)[0] for each in (last, first)]
    torch.testing.assert_close(*gradients)


def test_nft_trains_at_the_levels_of_the_sampler() -> None:
    policy = few_step_policy("flow", 4, NFT_4, path=RectifiedFlow(3.0))
    rng = toys.context(policy, 64).rng
    drawn = {round(t, 4) for draw in range(4) for t in NFT_4._levels(policy.process, rng, draw).tolist()}
    assert drawn == {1.0, 0.9, 0.75, 0.5}
    assert NFT()._levels(policy.process, rng, 0) is None


def test_settings_without_a_training_signal_are_refused() -> None:
    problems = find_problems(load("grpo-toy-flow", ["process.num_steps=1", "process.window=null"]), 1)
    assert any("TM2462" in problem for problem in problems)
    assert find_problems(load("grpo-toy-flow", ["process.num_steps=2", "process.window=null"]), 1) == []


def test_unusual_sampling_of_distilled_weights_is_warned_about() -> None:
    def warnings_of(*overrides: str) -> str:
        return " ".join(collect_warnings(load("grpo-sana-sprint", list(overrides))))

    assert "TM2460" not in warnings_of() and "TM2461" not in warnings_of()
    assert "TM2460" in warnings_of("process.num_steps=20")
    assert "TM2461" in warnings_of("guidance={scale: 3}")
    assert "TM246" not in warnings_of("guidance={scale: 3}", "model.weights=./my-model")
    schnell = "model.weights=black-forest-labs/FLUX.1-schnell"  # with the shift of FLUX.1-dev
    (warning,) = collect_warnings(load("dancegrpo-flux", [schnell, "process.num_steps=4"]))
    assert "process.path.shift=1.0000" in warning and "TM807" in warning
    assert "TM807" not in " ".join(collect_warnings(load("nft-flux-schnell")))


LEARNERS: dict[str, tuple[Objective[Any, Any, Any, Any], float, int, int]] = {  # with learning rate, steps and prompts
    "grpo": (GRPO(group_size=16, clip_range=1e-3), 1e-3, 45, 4),
    "nft": (NFT(group_size=8, kl_coef=0.1, levels="sampler"), 3e-4, 45, 8),
    "reward_gradient": (RewardGradient(last_steps=4), 1e-3, 20, 16),
}


@pytest.mark.parametrize("name", fast(LEARNERS, "reward_gradient"))
def test_reward_rises_with_four_steps(name: str) -> None:
    objective, lr, steps, prompts = LEARNERS[name]
    policy = toys.pretrained_policy("flow", snapshots=objective.snapshots())
    policy = replace(policy, process=replace(policy.process, num_steps=4))
    before = toys.true_rewards(policy, 256)
    toys.train(policy, objective, (toys.prompts(prompts) for _ in range(steps)), lr)
    assert toys.z_score(before, toys.true_rewards(policy, 256)) > 4
