"""DPO: the loss for known likelihoods, corruption of pairs, and online pairs."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import toys
from scripted_policy import scripted_policy

from tastemaker.core.randomness import Randomness
from tastemaker.core.types import Condition, Corrupted
from tastemaker.core.weights import FrozenCopyFinetuning
from tastemaker.objectives.dpo import DPO, PreferenceExperience, corrupt_pair, dpo_loss
from tastemaker.objectives.grpo import GRPO
from tastemaker.objectives.online_dpo import OnlineDPO

FIXTURES = Path(__file__).parent.parent / "fixtures"


def test_dpo_loss_matches_published() -> None:
    case = json.loads((FIXTURES / "video" / "ddpo_dpo_losses.json").read_text())["dpo"]
    chosen, rejected = (
        -torch.stack([torch.tensor(case[f"model_mse_{which}"]), torch.tensor(case[f"ref_mse_{which}"])], -1)
        for which in ("w", "l")
    )
    count, policy = len(chosen), scripted_policy()
    rng, ones = Randomness(0, 0, torch.arange(count)), torch.ones(count)
    pairs = PreferenceExperience(Condition(("",) * count), chosen, rejected, ones, rng, ones)
    noisy = Corrupted(chosen, ones, chosen), Corrupted(rejected, ones, rejected)
    loss = dpo_loss(policy, pairs, noisy, case["beta"] / 2, 0.0)  # beta of Diffusion-DPO is twice ours
    assert float(loss.rows.mean().detach()) == pytest.approx(case["loss"], rel=1e-6)
    assert float(loss.metrics["accuracy"].mean()) == case["implicit_acc"]


@pytest.mark.parametrize("name", toys.FAMILIES)
@pytest.mark.parametrize("noise_sharing", ["shared", "timestep", "independent"])
def test_first_dpo_loss_is_log_two(noise_sharing: Any, name: str) -> None:
    objective = DPO(noise_sharing=noise_sharing, num_timesteps=2)
    policy = toys.policy(name, FrozenCopyFinetuning(), objective.snapshots())
    ctx = toys.context(policy, 8)
    experience = objective.collect(ctx, toys.make_batch(objective, 8, policy.model.pixels))
    losses = toys.total_loss(objective, ctx, experience)
    torch.testing.assert_close(losses, torch.full((8,), math.log(2)))
    assert toys.gradient(policy, losses.sum()).any()


def test_noise_sharing_of_pairs() -> None:
    objective = DPO()
    policy = toys.policy("flow", snapshots=("reference",))
    pairs = objective.collect(toys.context(policy, 8), toys.pairs(8, 1, 0))
    shared, timestep, independent = (
        corrupt_pair(policy, pairs, noise_sharing, 0) for noise_sharing in ("shared", "timestep", "independent")
    )
    assert torch.equal(shared[0].t, shared[1].t) and torch.equal(shared[0].noise, shared[1].noise)
    assert torch.equal(timestep[0].t, timestep[1].t) and not torch.equal(timestep[0].noise, timestep[1].noise)
    assert not torch.equal(independent[0].t, independent[1].t)


def test_sft_term_is_the_likelihood_loss() -> None:
    plain, with_sft = DPO(), DPO(sft_coef=0.25)
    ctx, experience = toys.policy_with_experience(plain, "causal")
    sft_term = toys.total_loss(with_sft, ctx, experience) - toys.total_loss(plain, ctx, experience)
    noisy = ctx.policy.corrupt(experience.chosen, experience.rng)
    likelihood = ctx.policy.likelihood(experience.cond, experience.chosen, noisy) / 16
    torch.testing.assert_close(sft_term, -0.25 * likelihood, rtol=1e-4, atol=1e-5)


def test_online_pairs_are_best_and_worst_of_group() -> None:
    policy = toys.policy("causal", snapshots=("reference",))
    ctx = toys.context(policy, 8)
    pairs = OnlineDPO(group_size=4).collect(ctx, toys.prompts(8))
    rollout = GRPO(group_size=4).collect(ctx, toys.prompts(8))
    rewards, samples = rollout.reward.view(8, 4), rollout.trajectory.final.view(8, 4, -1)
    for i in range(8):
        assert torch.equal(pairs.chosen[i], samples[i, rewards[i].argmax()])
        assert torch.equal(pairs.rejected[i], samples[i, rewards[i].argmin()])
    assert pairs.cond.prompts == toys.prompts(8).prompts


@pytest.mark.parametrize("name", toys.FAMILIES)
def test_each_epoch_draws_new_corruptions(name: str) -> None:
    objective = DPO()
    ctx, experience = toys.policy_with_experience(objective, name)
    first_epoch = objective.loss(ctx, experience, 0).rows
    second_epoch = objective.loss(replace(ctx, epoch=1), experience, 0).rows
    assert torch.equal(first_epoch, objective.loss(ctx, experience, 0).rows)
    assert torch.equal(first_epoch, second_epoch) == (name == "causal")  # corruption of a sequence is not random


def test_more_timesteps_reduce_loss_variance() -> None:
    policy = toys.policy("masked", FrozenCopyFinetuning(), ("reference",))
    pairs = DPO().collect(toys.context(policy, 8), toys.pairs(8, 1, 0))
    toys.perturb(policy, 0.05)
    with torch.no_grad():
        losses = [dpo_loss(policy, pairs, corrupt_pair(policy, pairs, "shared", draw), 1.0, 0.0) for draw in range(64)]
    margins = torch.stack([loss.metrics["margin"] for loss in losses])
    assert margins.view(16, 4, 8).mean(1).var(0).mean() < 0.5 * margins.var(0).mean()


def test_prompt_dropout_applies_to_both_samples_of_a_pair() -> None:
    policy = toys.policy("masked", snapshots=("reference",))
    batch = toys.pairs(64, 1, 0)
    pairs = DPO(prompt_dropout=0.5).collect(toys.context(policy, 64), batch)
    assert 16 < sum(prompt == "" for prompt in pairs.cond.prompts) < 48
    assert DPO().collect(toys.context(policy, 64), batch).cond.prompts == batch.prompts
    with pytest.raises(ValueError, match=r"'prompt_dropout'.*2\.0.*TM303"):
        DPO(prompt_dropout=2.0)


@pytest.mark.parametrize("name", ["masked", "flow"])
def test_offline_reward_guidance_adds_its_policy_gradient(name: str) -> None:
    plain = DPO()
    guided = DPO(reward_guidance_coef=0.5, reward_guidance_samples=4)
    policy = toys.policy(name, FrozenCopyFinetuning(), guided.snapshots())
    ctx = toys.context(policy, 8)
    batch = toys.make_batch(guided, 8, policy.model.pixels)
    pairs, experience = plain.collect(ctx, batch), guided.collect(ctx, batch)
    guidance = experience.reward_guidance
    assert guidance is not None and len(guidance) == 8 and guidance.advantage.abs().max() > 0
    assert torch.equal(experience.chosen, pairs.chosen) and torch.equal(experience.rejected, pairs.rejected)
    assert guided.metrics(experience)["reward/mean"].any() and guided.samples_per_prompt() == 4
    dpo = toys.gradient(policy, toys.total_loss(plain, ctx, pairs).sum())
    log_probs = [
        (policy.action_distribution(guidance.trajectory.cond, s).log_prob(s.action) * s.mask).sum(1)
        for s in guidance.trajectory.segments
    ]
    term = toys.gradient(policy, -(guidance.advantage * torch.stack(log_probs).sum(0)).sum())
    assert term.abs().max() > 0  # in the published code it is 0
    total = toys.gradient(policy, toys.total_loss(guided, ctx, experience).sum())
    torch.testing.assert_close(total, dpo + 0.5 * term, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"reward_guidance_coef": -0.1}, r"reward_guidance_coef -0\.1.*TM088"),
        ({"reward_guidance_coef": 0.1, "reward_guidance_samples": 1}, "reward_guidance_samples 1.*TM088"),
        ({"reward_guidance_name": "orm"}, "'reward_guidance_name'.*TM313"),
    ],
)
def test_wrong_guidance_settings_are_refused(settings: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        DPO(**settings)
