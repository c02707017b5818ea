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
from tastemaker.objectives.online_dpo import MIN_REWARD, OnlineDPO, guidance_loss
from tastemaker.rewards.playground import PlaygroundJudgeReward
from tastemaker.training.events import StepCompleted
from tastemaker.training.loop import train

FAMILIES = [*toys.FAMILIES]


def collected(objective: OnlineDPO, policy: Any, step: int = 0) -> Any:
    return objective.collect(toys.context(policy, 8, step=step), toys.prompts(8))


@pytest.mark.parametrize("name", FAMILIES)
def test_samples_of_a_round_use_its_initial_weights(name: str) -> None:
    objective = OnlineDPO(round_steps=2)
    policy = toys.policy(name, FrozenCopyFinetuning(), objective.snapshots())
    assert objective.snapshots() == ("round",)
    before = collected(objective, policy)
    toys.perturb(policy, 0.1)
    assert torch.equal(before.chosen, collected(objective, policy).chosen)
    objective.after_update(toys.context(policy, 8, step=0))  # the round has two steps
    assert torch.equal(before.chosen, collected(objective, policy).chosen)
    objective.after_update(toys.context(policy, 8, step=1))
    assert not torch.equal(before.chosen, collected(objective, policy).chosen)


@pytest.mark.parametrize("renew", [True, False])
def test_reset_reference_at_each_round(renew: bool) -> None:
    objective = OnlineDPO(round_steps=1, reset_reference=renew)
    policy = toys.policy("masked", FrozenCopyFinetuning(), objective.snapshots())
    toys.perturb(policy, 0.1)
    objective.after_update(toys.context(policy, 8))
    losses = toys.total_loss(objective, toys.context(policy, 8, step=1), collected(objective, policy, 1))
    same = torch.allclose(losses[losses > 0], torch.tensor(math.log(2)))
    assert same == renew and bool((losses > 0).any())


def options(folder: Path, family: str, *more: str) -> Any:
    settings = [
        "objective={type: online_dpo, group_size: 4, round_steps: 2, reward_guidance_coef: 0.1}",
        "steps=5",
        "batch.prompts=4",
    ]
    return build(
        load(
            f"grpo-toy-{family}", [*settings, "checkpoint.every=3", "checkpoint.keep_last=9", "sample.every=0", *more]
        ),
        folder,
    )


def weights(run: Any) -> list[Tensor]:
    return [p.detach().clone() for p in run.policy.weights.trainable().values()]


FULL, TWIN, LORA = "tuning={type: full}", "tuning={type: frozen_copy}", "tuning={type: lora, rank: 2}"
QUICK = [("masked", FULL), ("causal", TWIN), ("flow", LORA)]
RESUMED = [(family, tuning) for family in ("masked", "causal", "flow") for tuning in (FULL, TWIN, LORA)]


@pytest.mark.parametrize(
    ("family", "tuning"),
    [pytest.param(*cell, marks=[] if cell in QUICK else [pytest.mark.slow]) for cell in RESUMED],
)
def test_resume_within_a_round_is_exact(family: str, tuning: str, tmp_path: Path) -> None:
    straight = options(tmp_path / "run", family, tuning)
    told = [event.metrics for event in train(straight) if isinstance(event, StepCompleted)]
    again = options(tmp_path / "other", family, tuning)
    again.resume(tmp_path / "run/checkpoints/step-000003")
    resumed = [event.metrics for event in train(again) if isinstance(event, StepCompleted)]
    assert resumed == told[3:]
    assert all(torch.equal(a, b) for a, b in zip(weights(straight), weights(again), strict=True))


def test_reward_guidance_gradient_is_of_expected_log_reward() -> None:
    objective = OnlineDPO(group_size=4, reward_guidance_coef=0.5)
    policy = toys.policy("masked", FrozenCopyFinetuning(), objective.snapshots())
    ctx = toys.context(policy, 8)
    seen = objective.collect(ctx, toys.prompts(8))
    steering = seen.reward_guidance
    assert steering is not None and steering.advantage.abs().max() > 0
    segments = range(len(steering.trajectory.segments))
    found = toys.gradient(policy, torch.stack([guidance_loss(policy, steering, i).rows for i in segments]).sum())
    likely = [
        (policy.action_distribution(steering.trajectory.cond, s).log_prob(s.action) * s.mask).sum(1)
        for s in steering.trajectory.segments
    ]
    expected = toys.gradient(policy, -(steering.advantage * torch.stack(likely).sum(0)).sum())
    assert found.abs().max() > 0
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)
    # As published: the reward of a sample is a number, and the loss built of it has no graph.
    constant = 0.5 * -torch.as_tensor(steering.advantage.tolist())
    assert not constant.requires_grad


@pytest.mark.parametrize("name", ["masked", "causal", "flow"])
def test_reward_guidance_adds_to_dpo_gradient(name: str) -> None:
    objective = OnlineDPO(group_size=4, reward_guidance_coef=0.5)
    policy = toys.policy(name, FrozenCopyFinetuning(), objective.snapshots())
    ctx = toys.context(policy, 8)
    seen = objective.collect(ctx, toys.prompts(8))
    plain = replace(objective, reward_guidance_coef=0.0)
    alone = toys.gradient(policy, toys.total_loss(plain, ctx, replace(seen, reward_guidance=None)).sum())
    assert (toys.gradient(policy, toys.total_loss(objective, ctx, seen).sum()) - alone).abs().max() > 0


def test_reward_guidance_advantage_is_relative_to_group() -> None:
    objective = OnlineDPO(group_size=4, reward_guidance_coef=1.0)
    policy = toys.policy("causal", snapshots=objective.snapshots())
    ctx = toys.context(policy, 8)
    seen = objective.collect(ctx, toys.prompts(8))
    rng = ctx.rng.repeat(4)
    made = policy.sample(policy.embed(toys.prompts(8).prompts).repeat(4), rng)
    logs = ctx.rubric.score(policy.decode(made.final), made.cond.prompts).total.clamp(min=MIN_REWARD).log().view(8, 4)
    assert seen.reward_guidance is not None and torch.equal(seen.reward_guidance.trajectory.final, made.final[::4])
    torch.testing.assert_close(seen.reward_guidance.advantage, logs[:, 0] - logs[:, 1:].mean(1))


def test_reward_of_weight_zero_can_guide() -> None:
    judged = "rewards={verdict: {type: playground_verdict}, judge: {type: playground_judge, weight: 0}}"
    guided = [
        "objective.reward_guidance_coef=0.2",
        "objective.reward_guidance_name=judge",
        "steps=1",
        "batch.prompts=4",
        "sample.every=0",
    ]
    run = build(load("dpo-playground-masked", [judged, *guided, "guard.every=0", "engine.device=cpu"]), tiny=True)
    (told,) = [event.metrics for event in train(run) if isinstance(event, StepCompleted)]
    assert told["reward_guidance/ratio"] == pytest.approx(1, abs=1e-3)
    assert PlaygroundJudgeReward().tiny().load(Placement()) is not None


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"round_steps": -1}, "round_steps -1"),
        ({"reward_guidance_coef": -0.1}, "reward_guidance_coef -0.1"),
        ({"reward_guidance_name": "orm"}, "'reward_guidance_coef' is 0"),
    ],
)
def test_invalid_settings_are_refused(settings: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        OnlineDPO(**settings)


def test_unknown_guidance_reward_is_refused() -> None:
    objective = OnlineDPO(reward_guidance_coef=0.1, reward_guidance_name="orm")
    with pytest.raises(ConfigError, match="there is no reward 'orm'; name one of color"):
        collected(objective, toys.policy("masked", snapshots=objective.snapshots()))
