"""Iterative DPO: rounds, reference, resume, and reward guidance."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import toys
from torch import Tensor

from tastemaker.config.build import build
from tastemaker.config.load import load
from tastemaker.core.registry import ConfigError
from tastemaker.core.types import Placement
from tastemaker.core.weights import FrozenCopyFinetuning
from tastemaker.objectives.online_dpo import OnlineDPO
from tastemaker.objectives.reward_guidance import MIN_REWARD, guidance_loss
from tastemaker.rewards.playground import PlaygroundJudgeReward
from tastemaker.training.events import StepCompleted
from tastemaker.training.loop import train

FAMILIES = [*toys.FAMILIES]


def collect(objective: OnlineDPO, policy: Any, step: int = 0) -> Any:
    return objective.collect(toys.context(policy, 8, step=step), toys.prompts(8))


@pytest.mark.parametrize("name", FAMILIES)
def test_samples_of_a_round_use_its_initial_weights(name: str) -> None:
    objective = OnlineDPO(round_steps=2)
    policy = toys.policy(name, FrozenCopyFinetuning(), objective.snapshots())
    assert objective.snapshots() == ("round",)
    first = collect(objective, policy)
    toys.perturb(policy, 0.1)
    assert torch.equal(first.chosen, collect(objective, policy).chosen)
    objective.after_update(toys.context(policy, 8, step=0))  # the round has two steps
    assert torch.equal(first.chosen, collect(objective, policy).chosen)
    objective.after_update(toys.context(policy, 8, step=1))
    assert not torch.equal(first.chosen, collect(objective, policy).chosen)


@pytest.mark.parametrize("reset", [True, False])
def test_reset_reference_at_each_round(reset: bool) -> None:
    objective = OnlineDPO(round_steps=1, reset_reference=reset)
    policy = toys.policy("masked", FrozenCopyFinetuning(), objective.snapshots())
    toys.perturb(policy, 0.1)
    objective.after_update(toys.context(policy, 8))
    losses = toys.total_loss(objective, toys.context(policy, 8, step=1), collect(objective, policy, 1))
    is_log_two = torch.allclose(losses[losses > 0], torch.tensor(math.log(2)))
    assert is_log_two == reset and bool((losses > 0).any())


def build_run(directory: Path, family: str, *overrides: str) -> Any:
    settings = [
        "objective={type: online_dpo, group_size: 4, round_steps: 2, reward_guidance_coef: 0.1}",
        "steps=5",
        "batch.prompts=4",
    ]
    return build(
        load(
            f"grpo-toy-{family}",
            [*settings, "checkpoint.every=3", "checkpoint.keep_last=9", "sample.every=0", *overrides],
        ),
        directory,
    )


def weights(run: Any) -> list[Tensor]:
    return [p.detach().clone() for p in run.policy.weights.trainable().values()]


FULL, FROZEN_COPY, LORA = "tuning={type: full}", "tuning={type: frozen_copy}", "tuning={type: lora, rank: 2}"
FAST = [("masked", FULL), ("causal", FROZEN_COPY), ("flow", LORA)]
CASES = [(family, tuning) for family in ("masked", "causal", "flow") for tuning in (FULL, FROZEN_COPY, LORA)]


@pytest.mark.parametrize(
    ("family", "tuning"),
    [pytest.param(*cell, marks=[] if cell in FAST else [pytest.mark.slow]) for cell in CASES],
)
def test_resume_within_a_round_is_exact(family: str, tuning: str, tmp_path: Path) -> None:
    uninterrupted = build_run(tmp_path / "run", family, tuning)
    expected = [event.metrics for event in train(uninterrupted) if isinstance(event, StepCompleted)]
    resumed_run = build_run(tmp_path / "other", family, tuning)
    resumed_run.resume(tmp_path / "run/checkpoints/step-000003")
    metrics = [event.metrics for event in train(resumed_run) if isinstance(event, StepCompleted)]
    assert metrics == expected[3:]
    assert all(torch.equal(a, b) for a, b in zip(weights(uninterrupted), weights(resumed_run), strict=True))


def test_reward_guidance_gradient_is_of_expected_log_reward() -> None:
    objective = OnlineDPO(group_size=4, reward_guidance_coef=0.5)
    policy = toys.policy("masked", FrozenCopyFinetuning(), objective.snapshots())
    ctx = toys.context(policy, 8)
    experience = objective.collect(ctx, toys.prompts(8))
    reward_guidance = experience.reward_guidance
    assert reward_guidance is not None and reward_guidance.advantage.abs().max() > 0
    segments = range(len(reward_guidance.trajectory.segments))
    gradient = toys.gradient(
        policy, torch.stack([guidance_loss(policy, reward_guidance, i).rows for i in segments]).sum()
    )
    log_probs = [
        (policy.action_distribution(reward_guidance.trajectory.cond, s).log_prob(s.action) * s.mask).sum(1)
        for s in reward_guidance.trajectory.segments
    ]
    expected = toys.gradient(policy, -(reward_guidance.advantage * torch.stack(log_probs).sum(0)).sum())
    assert gradient.abs().max() > 0
    torch.testing.assert_close(gradient, expected, rtol=1e-4, atol=1e-6)
    # In the published code the reward of a sample is a number, and its loss has no graph.
    constant = 0.5 * -torch.as_tensor(reward_guidance.advantage.tolist())
    assert not constant.requires_grad


@pytest.mark.parametrize("name", ["masked", "causal", "flow"])
def test_reward_guidance_adds_to_dpo_gradient(name: str) -> None:
    objective = OnlineDPO(group_size=4, reward_guidance_coef=0.5)
    policy = toys.policy(name, FrozenCopyFinetuning(), objective.snapshots())
    ctx = toys.context(policy, 8)
    experience = objective.collect(ctx, toys.prompts(8))
    plain = replace(objective, reward_guidance_coef=0.0)
    dpo_gradient = toys.gradient(policy, toys.total_loss(plain, ctx, replace(experience, reward_guidance=None)).sum())
    assert (toys.gradient(policy, toys.total_loss(objective, ctx, experience).sum()) - dpo_gradient).abs().max() > 0


def test_reward_guidance_advantage_is_relative_to_group() -> None:
    objective = OnlineDPO(group_size=4, reward_guidance_coef=1.0)
    policy = toys.policy("causal", snapshots=objective.snapshots())
    ctx = toys.context(policy, 8)
    experience = objective.collect(ctx, toys.prompts(8))
    rng = ctx.rng.repeat(4)
    trajectory = policy.sample(policy.embed(toys.prompts(8).prompts).repeat(4), rng)
    log_rewards = (
        ctx.rubric.score(policy.decode(trajectory.final), trajectory.cond.prompts)
        .total.clamp(min=MIN_REWARD)
        .log()
        .view(8, 4)
    )
    assert experience.reward_guidance is not None and torch.equal(
        experience.reward_guidance.trajectory.final, trajectory.final[::4]
    )
    torch.testing.assert_close(experience.reward_guidance.advantage, log_rewards[:, 0] - log_rewards[:, 1:].mean(1))


def test_reward_of_weight_zero_can_guide() -> None:
    rewards = "rewards={verdict: {type: playground_verdict}, judge: {type: playground_judge, weight: 0}}"
    settings = [
        "objective.reward_guidance_coef=0.2",
        "objective.reward_guidance_name=judge",
        "steps=1",
        "batch.prompts=4",
        "sample.every=0",
    ]
    run = build(load("dpo-playground-masked", [rewards, *settings, "guard.every=0", "engine.device=cpu"]), tiny=True)
    (metrics,) = [event.metrics for event in train(run) if isinstance(event, StepCompleted)]
    assert metrics["reward_guidance/ratio"] == pytest.approx(1, abs=1e-3)
    assert PlaygroundJudgeReward().tiny().load(Placement()) is not None


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"round_steps": -1}, "round_steps.*-1"),
        ({"reward_guidance_coef": -0.1}, r"reward_guidance_coef.*-0\.1"),
        ({"reward_guidance_name": "orm"}, "'reward_guidance_name'.*'reward_guidance_coef'"),
    ],
)
def test_invalid_settings_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        OnlineDPO(**settings)


def test_unknown_guidance_reward_is_refused() -> None:
    objective = OnlineDPO(reward_guidance_coef=0.1, reward_guidance_name="orm")
    with pytest.raises(ConfigError, match=r"'orm'.*color.*TM310"):
        collect(objective, toys.policy("masked", snapshots=objective.snapshots()))
