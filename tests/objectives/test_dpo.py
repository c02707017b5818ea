"""DPO: the loss for given likelihoods, corruption of pairs, and online pairs."""

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
    rows, policy = len(chosen), scripted_policy()
    rng, ones = Randomness(0, 0, torch.arange(rows)), torch.ones(rows)
    seen = PreferenceExperience(Condition(("",) * rows), chosen, rejected, ones, rng, ones)
    noisy = Corrupted(chosen, ones, chosen), Corrupted(rejected, ones, rejected)
    loss = dpo_loss(policy, seen, noisy, case["beta"] / 2, 0.0)  # Diffusion-DPO has beta/2 where we have beta
    assert float(loss.rows.mean().detach()) == pytest.approx(case["loss"], rel=1e-6)
    assert float(loss.metrics["accuracy"].mean()) == case["implicit_acc"]


@pytest.mark.parametrize("name", toys.FAMILIES)
@pytest.mark.parametrize("corruption", ["shared", "timestep", "independent"])
def test_first_dpo_loss_is_log_two(corruption: Any, name: str) -> None:
    objective = DPO(noise_sharing=corruption, num_timesteps=2)
    policy = toys.policy(name, FrozenCopyFinetuning(), objective.snapshots())
    ctx = toys.context(policy, 8)
    experience = objective.collect(ctx, toys.make_batch(objective, 8, policy.model.pixels))
    losses = toys.total_loss(objective, ctx, experience)
    torch.testing.assert_close(losses, torch.full((8,), math.log(2)))
    assert toys.gradient(policy, losses.sum()).any()


def test_noise_sharing_of_pairs() -> None:
    objective = DPO()
    policy = toys.policy("flow", snapshots=("reference",))
    seen = objective.collect(toys.context(policy, 8), toys.pairs(8, 1, 0))
    shared, level, independent = (corrupt_pair(policy, seen, how, 0) for how in ("shared", "timestep", "independent"))
    assert torch.equal(shared[0].t, shared[1].t) and torch.equal(shared[0].noise, shared[1].noise)
    assert torch.equal(level[0].t, level[1].t) and not torch.equal(level[0].noise, level[1].noise)
    assert not torch.equal(independent[0].t, independent[1].t)


def test_sft_term_is_the_likelihood_loss() -> None:
    plain, both = DPO(), DPO(sft_coef=0.25)
    ctx, experience = toys.policy_with_experience(plain, "causal")
    extra = toys.total_loss(both, ctx, experience) - toys.total_loss(plain, ctx, experience)
    noisy = ctx.policy.corrupt(experience.chosen, experience.rng)
    likelihood = ctx.policy.likelihood(experience.cond, experience.chosen, noisy) / 16
    torch.testing.assert_close(extra, -0.25 * likelihood, rtol=1e-4, atol=1e-5)


def test_online_pairs_are_best_and_worst_of_group() -> None:
    policy = toys.policy("causal", snapshots=("reference",))
    ctx = toys.context(policy, 8)
    pairs = OnlineDPO(group_size=4).collect(ctx, toys.prompts(8))
    rated = GRPO(group_size=4).collect(ctx, toys.prompts(8))
    groups, made = rated.reward.view(8, 4), rated.trajectory.final.view(8, 4, -1)
    for i in range(8):
        assert torch.equal(pairs.chosen[i], made[i, groups[i].argmax()])
        assert torch.equal(pairs.rejected[i], made[i, groups[i].argmin()])
    assert pairs.cond.prompts == toys.prompts(8).prompts


@pytest.mark.parametrize("name", toys.FAMILIES)
def test_each_epoch_draws_new_corruptions(name: str) -> None:
    objective = DPO()
    ctx, experience = toys.policy_with_experience(objective, name)
    again = objective.loss(ctx, experience, 0).rows
    later = objective.loss(replace(ctx, epoch=1), experience, 0).rows
    assert torch.equal(again, objective.loss(ctx, experience, 0).rows)
    assert torch.equal(again, later) == (name == "causal")  # nothing is drawn to corrupt a sequence


def test_more_timesteps_reduce_loss_variance() -> None:
    policy = toys.policy("masked", FrozenCopyFinetuning(), ("reference",))
    seen = DPO().collect(toys.context(policy, 8), toys.pairs(8, 1, 0))
    toys.perturb(policy, 0.05)
    with torch.no_grad():
        each = [dpo_loss(policy, seen, corrupt_pair(policy, seen, "shared", draw), 1.0, 0.0) for draw in range(64)]
    margins = torch.stack([loss.metrics["margin"] for loss in each])
    assert margins.view(16, 4, 8).mean(1).var(0).mean() < 0.5 * margins.var(0).mean()


def test_prompt_dropout_applies_to_both_samples_of_a_pair() -> None:
    policy = toys.policy("masked", snapshots=("reference",))
    batch = toys.pairs(64, 1, 0)
    seen = DPO(prompt_dropout=0.5).collect(toys.context(policy, 64), batch)
    assert 16 < sum(prompt == "" for prompt in seen.cond.prompts) < 48
    assert DPO().collect(toys.context(policy, 64), batch).cond.prompts == batch.prompts
    with pytest.raises(ValueError, match=r"'prompt_dropout' is 2.0"):
        DPO(prompt_dropout=2.0)
