"""Iterative DPO: whose samples a round is about, what its reference is, how it resumes, and what a judge adds to it."""

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
from tastemaker.objectives.reward_guidance import FLOOR, guidance_loss
from tastemaker.rewards.playground_judge import PlaygroundJudge
from tastemaker.training.events import StepCompleted
from tastemaker.training.loop import train

FAMILIES = [*toys.FAMILIES]


def collected(objective: OnlineDPO, policy: Any, step: int = 0) -> Any:
    return objective.collect(toys.context(policy, 8, step=step), toys.prompts(8))


@pytest.mark.parametrize("name", FAMILIES)
def test_all_samples_of_a_round_are_of_the_weights_it_began_with(name: str) -> None:
    objective = OnlineDPO(round=2)
    policy = toys.policy(name, FrozenCopyFinetuning(), objective.snapshots())
    assert objective.snapshots() == ("round",)
    before = collected(objective, policy)
    toys.move(policy, 0.1)
    assert torch.equal(before.chosen, collected(objective, policy).chosen)
    objective.after_update(toys.context(policy, 8, step=0))  # the round has two steps
    assert torch.equal(before.chosen, collected(objective, policy).chosen)
    objective.after_update(toys.context(policy, 8, step=1))
    assert not torch.equal(before.chosen, collected(objective, policy).chosen)


@pytest.mark.parametrize("renew", [True, False])
def test_the_reference_begins_anew_with_each_round_or_stays(renew: bool) -> None:
    objective = OnlineDPO(round=1, renew=renew)
    policy = toys.policy("masked", FrozenCopyFinetuning(), objective.snapshots())
    toys.move(policy, 0.1)
    objective.after_update(toys.context(policy, 8))
    losses = toys.total(objective, toys.context(policy, 8, step=1), collected(objective, policy, 1))
    same = torch.allclose(losses[losses > 0], torch.tensor(math.log(2)))
    assert same == renew and bool((losses > 0).any())


def options(folder: Path, family: str, *more: str) -> Any:
    settings = ["objective={type: online_dpo, group: 4, round: 2, guide: 0.1}", "steps=5", "batch.prompts=4"]
    return build(
        load(f"grpo-toy-{family}", [*settings, "checkpoint.every=3", "checkpoint.keep=9", "sample.every=0", *more]),
        folder,
    )


def weights(run: Any) -> list[Tensor]:
    return [p.detach().clone() for p in run.policy.weights.trainable().values()]


FULL, TWIN, LORA = "tuning={type: full}", "tuning={type: twin}", "tuning={type: lora, rank: 2}"
QUICK = [("masked", FULL), ("causal", TWIN), ("flow", LORA)]
RESUMED = [(family, tuning) for family in ("masked", "causal", "flow") for tuning in (FULL, TWIN, LORA)]


@pytest.mark.parametrize(
    ("family", "tuning"),
    [pytest.param(*cell, marks=[] if cell in QUICK else [pytest.mark.slow]) for cell in RESUMED],
)
def test_a_run_stopped_within_a_round_goes_on_bit_for_bit(family: str, tuning: str, tmp_path: Path) -> None:
    straight = options(tmp_path / "run", family, tuning)
    told = [event.metrics for event in train(straight) if isinstance(event, StepCompleted)]
    again = options(tmp_path / "other", family, tuning)
    again.resume(tmp_path / "run/checkpoints/step-000003")
    resumed = [event.metrics for event in train(again) if isinstance(event, StepCompleted)]
    assert resumed == told[3:]
    assert all(torch.equal(a, b) for a, b in zip(weights(straight), weights(again), strict=True))


def test_the_guidance_has_the_gradient_of_the_expected_minus_log_reward() -> None:
    objective = OnlineDPO(group=4, guide=0.5)
    policy = toys.policy("masked", FrozenCopyFinetuning(), objective.snapshots())
    ctx = toys.context(policy, 8)
    seen = objective.collect(ctx, toys.prompts(8))
    steering = seen.steering
    assert steering is not None and steering.advantage.abs().max() > 0
    segments = range(len(steering.trajectory.segments))
    found = toys.gradient(policy, torch.stack([guidance_loss(policy, steering, i).rows for i in segments]).sum())
    likely = [
        (policy.decide(steering.trajectory.cond, s).log_prob(s.action) * s.mask).sum(1)
        for s in steering.trajectory.segments
    ]
    expected = toys.gradient(policy, -(steering.advantage * torch.stack(likely).sum(0)).sum())
    assert found.abs().max() > 0
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)
    # As published: the reward of a sample is a number, and the loss built of it has no graph.
    constant = 0.5 * -torch.as_tensor(steering.advantage.tolist())
    assert not constant.requires_grad


@pytest.mark.parametrize("name", ["masked", "causal", "flow"])
def test_guidance_adds_to_the_gradient_of_preferences(name: str) -> None:
    objective = OnlineDPO(group=4, guide=0.5)
    policy = toys.policy(name, FrozenCopyFinetuning(), objective.snapshots())
    ctx = toys.context(policy, 8)
    seen = objective.collect(ctx, toys.prompts(8))
    plain = replace(objective, guide=0.0)
    alone = toys.gradient(policy, toys.total(plain, ctx, replace(seen, steering=None)).sum())
    assert (toys.gradient(policy, toys.total(objective, ctx, seen).sum()) - alone).abs().max() > 0


def test_a_sample_is_held_against_the_other_samples_of_its_prompt() -> None:
    objective = OnlineDPO(group=4, guide=1.0)
    policy = toys.policy("causal", snapshots=objective.snapshots())
    ctx = toys.context(policy, 8)
    seen = objective.collect(ctx, toys.prompts(8))
    rng = ctx.rng.repeat(4)
    made = policy.sample(policy.embed(toys.prompts(8).prompts).repeat(4), rng)
    logs = ctx.rubric.score(policy.decode(made.final), made.cond.prompts).total.clamp(min=FLOOR).log().view(8, 4)
    assert seen.steering is not None and torch.equal(seen.steering.trajectory.final, made.final[::4])
    torch.testing.assert_close(seen.steering.advantage, logs[:, 0] - logs[:, 1:].mean(1))


def test_a_judge_that_is_only_watched_can_guide_by_its_name() -> None:
    judged = "rewards={verdict: {type: playground_verdict}, judge: {type: playground_judge, weight: 0}}"
    guided = ["objective.guide=0.2", "objective.guide_by=judge", "steps=1", "batch.prompts=4", "sample.every=0"]
    run = build(load("dpo-playground-masked", [judged, *guided, "guard.every=0", "engine.device=cpu"]), tiny=True)
    (told,) = [event.metrics for event in train(run) if isinstance(event, StepCompleted)]
    assert told["guide_ratio"] == pytest.approx(1, abs=1e-3)
    assert PlaygroundJudge().tiny().load(Placement()) is not None


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"round": -1}, "expected both to be at least 0"),
        ({"guide": -0.1}, "expected both to be at least 0"),
        ({"guide_by": "orm"}, "'guide' is 0; give it a weight"),
    ],
)
def test_impossible_settings_are_sentences(settings: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        OnlineDPO(**settings)


def test_a_judge_that_is_not_there_is_a_sentence() -> None:
    objective = OnlineDPO(guide=0.1, guide_by="orm")
    with pytest.raises(ConfigError, match="there is no reward 'orm'; name one of color"):
        collected(objective, toys.policy("masked", snapshots=objective.snapshots()))
