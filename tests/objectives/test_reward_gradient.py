"""Reward gradients: which network calls are in the graph, and which frames are scored."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import toys

from tastemaker.config.load import load
from tastemaker.core.policy import Policy
from tastemaker.core.randomness import Randomness
from tastemaker.core.types import Placement, select_rows
from tastemaker.core.weights import FullFinetuning
from tastemaker.models.toy import ToyFlowSpec
from tastemaker.objectives.reward_gradient import RewardGradient, decode_frames, select_frames
from tastemaker.processes.dynamics import ODE
from tastemaker.processes.gaussian import GaussianProcess
from tastemaker.processes.paths import RectifiedFlow


def graphs(objective: RewardGradient, step: int = 0) -> list[bool]:
    """Of each call of the network in a training step, whether it is in the graph."""
    policy = toys.policy("flow")
    calls: list[bool] = []
    policy.model.net.register_forward_hook(lambda net, inputs, output: calls.append(output.requires_grad))
    ctx = toys.context(policy, 4, step=step)
    toys.backward(objective, ctx, objective.collect(ctx, toys.prompts(4)))
    return calls


def marked(*places: int, of: int = 8) -> list[bool]:
    return [i in places for i in range(of)]


def test_last_steps_mode_keeps_final_graph() -> None:
    assert graphs(RewardGradient()) == marked(7)
    assert graphs(RewardGradient(last_steps=3)) == marked(5, 6, 7)
    assert graphs(RewardGradient(last_steps=8)) == graphs(RewardGradient(last_steps=20)) == [True] * 8


def test_from_step_mode_starts_graph_at_step() -> None:
    assert graphs(RewardGradient(gradient_mode="from_step", from_step=5)) == marked(5, 6, 7)


def test_random_mode_starts_graph_at_any_step() -> None:
    seen = {tuple(graphs(RewardGradient(gradient_mode="random"), step)) for step in range(40)}
    assert seen == {tuple(marked(*range(first, 8))) for first in range(8)}


def test_steps_mode_keeps_listed_steps_only() -> None:
    assert graphs(RewardGradient(gradient_mode="steps", steps=(2, 5))) == marked(2, 5)


def test_single_step_mode_ends_the_rollout() -> None:
    for step in range(10):
        calls = graphs(RewardGradient(gradient_mode="single_step", step_range=(4, 6)), step)
        assert 5 <= len(calls) <= 7
        assert calls == marked(len(calls) - 1, of=len(calls))


def test_renoise_mode_costs_one_call_per_copy() -> None:
    assert graphs(RewardGradient(gradient_mode="renoise", num_renoise=3)) == [False] * 8 + [True] * 3


def test_renoise_mode_uses_the_last_timestep() -> None:
    assert RewardGradient(gradient_mode="renoise").first_step(Randomness(0, 0, torch.arange(4)), 8) == 7


def test_renoise_draws_new_noise_per_copy_and_epoch() -> None:
    objective, ctx = RewardGradient(gradient_mode="renoise", num_renoise=2), toys.context(toys.policy("flow"), 4)
    experience = objective.collect(ctx, toys.prompts(4))
    rows = [objective.loss(replace(ctx, epoch=e), experience, part).rows for e in (0, 1) for part in (0, 1)]
    assert len({tuple(row.tolist()) for row in rows}) == 4


def test_truncated_normal_start_step_is_shared_by_ranks() -> None:
    objective = RewardGradient(gradient_mode="truncated_normal", start_step_mean=42.0, start_step_std=5.0)
    drawn = [objective.first_step(Randomness(0, step, torch.arange(4)), 50) for step in range(400)]
    others = [objective.first_step(Randomness(0, step, torch.arange(4) + 4), 50) for step in range(400)]
    assert drawn == others
    assert min(drawn) >= 1
    assert max(drawn) <= 49
    assert sum(drawn) / len(drawn) == pytest.approx(41, abs=1)  # truncation to whole steps, and at the last


@pytest.mark.parametrize(
    "objective",
    [
        RewardGradient(gradient_mode="from_step", from_step=8),
        RewardGradient(gradient_mode="single_step", step_range=(4, 9)),
        RewardGradient(gradient_mode="steps", steps=(2, 9)),
    ],
)
def test_step_beyond_the_sampler_is_refused(objective: RewardGradient) -> None:
    with pytest.raises(ValueError, match=r"step \d of a sampler with 8 steps"):
        graphs(objective)


@pytest.mark.parametrize("detach_input", [True, False])
def test_detach_input_keeps_the_skip_gradient(detach_input: bool) -> None:
    """On a straight path the next level is x plus a multiple of the velocity: with that held, d next / d x is one."""
    policy = replace(toys.policy("flow"), process=GaussianProcess(RectifiedFlow(), ODE(), 8))
    rollout = policy.rollout(policy.embed(toys.PROMPTS), Randomness(0, 0, torch.arange(4)))
    rollout.x = x = rollout.x.clone().requires_grad_()
    rollout.step(detach_input=detach_input)
    (gradient,) = torch.autograd.grad(rollout.x.sum(), x)
    assert torch.allclose(gradient, torch.ones_like(x), atol=1e-5) == detach_input
    assert rollout.x.requires_grad


def test_frozen_call_is_constant_in_the_graph() -> None:
    policy = replace(toys.policy("flow"), process=GaussianProcess(RectifiedFlow(), ODE(), 8))
    rollout = policy.rollout(policy.embed(toys.PROMPTS), Randomness(0, 0, torch.arange(4)))
    rollout.step(frozen=True)
    assert not rollout.x.requires_grad
    rollout.step()
    rollout.step(frozen=True)
    assert rollout.x.requires_grad


def small() -> Policy[Any]:
    model = ToyFlowSpec().tiny().load(Placement())
    return Policy(model, GaussianProcess(RectifiedFlow(), ODE(), 3), FullFinetuning().apply(model, ()))


@pytest.mark.parametrize(
    "objective", [RewardGradient(last_steps=3), RewardGradient(last_steps=3, reward_threshold=0.9, loss_scale=2.0)]
)
def test_gradient_through_sampler_matches_finite_differences(objective: RewardGradient) -> None:
    policy = small()
    ctx = toys.context(policy, 8)
    experience = objective.collect(ctx, toys.prompts(8))
    parameters = list(policy.weights.trainable().values())
    gradient = torch.autograd.grad(objective.loss(ctx, experience, 0).rows.sum(), parameters)
    length = torch.cat([g.flatten() for g in gradient]).norm()

    @torch.no_grad()
    def moved(by: float) -> float:
        for p, g in zip(parameters, gradient, strict=True):
            p.add_(by * g / length)
        value = float(objective.loss(ctx, experience, 0).rows.double().sum())
        for p, g in zip(parameters, gradient, strict=True):
            p.sub_(by * g / length)
        return value

    step = 1e-2  # long enough for float32, short enough for the curvature
    assert (moved(step) - moved(-step)) / (2 * step) == pytest.approx(float(length), rel=1e-2)


def test_rewards_above_threshold_have_no_gradient() -> None:
    ctx = toys.context(toys.policy("flow"), 8)
    experience = RewardGradient().collect(ctx, toys.prompts(8))
    plain, held = (RewardGradient(reward_threshold=t).loss(ctx, experience, 0) for t in (None, 0.6))
    torch.testing.assert_close(held.rows, (0.6 + plain.rows).relu())
    torch.testing.assert_close(plain.rows, -plain.metrics["reward/mean"])
    assert (held.rows == 0).any()


@pytest.mark.parametrize(
    ("frames", "picked"),
    [
        ("first", [0]),
        ("middle", [1]),
        ("last", [2]),
        ("fml", [0, 1, 2]),
        ("all", [0, 1, 2]),
        ("alt", [0, 2]),
        (1, [1]),
        ((2, 0, 2), [2, 0]),
    ],
)
def test_only_selected_frames_are_scored(frames: Any, picked: list[int]) -> None:
    policy = toys.policy("video")
    ctx = toys.context(policy, 4)
    experience = RewardGradient().collect(ctx, toys.prompts(4))
    found = RewardGradient(frames=frames).loss(ctx, experience, 0).metrics["reward/mean"]
    clip = policy.decode(policy.sample(experience.cond, experience.rng).final)[:, picked]
    torch.testing.assert_close(found, ctx.rubric.score(clip, toys.PROMPTS).total, rtol=1e-4, atol=1e-5)


def test_negative_steps_are_refused() -> None:
    for wrong in ({"gradient_mode": "from_step", "from_step": -1}, {"gradient_mode": "steps", "steps": (2, -1)}):
        with pytest.raises(ValueError, match="expected steps from 0"):
            RewardGradient(**wrong)


def test_named_frames_of_a_longer_video() -> None:
    assert select_frames("fml", 16) == [0, 8, 15]
    assert select_frames("fml", 1) == [0]
    assert select_frames("alt", 7) == [0, 2, 4, 6]
    assert select_frames("all", 7) is None


def test_random_frame_per_video_does_not_depend_on_batches() -> None:
    policy = toys.policy("video")
    shown: list[Any] = []
    for step in range(12):
        rng = Randomness(0, step, torch.arange(8))
        x = torch.randn(8, *policy.model.shape, generator=torch.Generator().manual_seed(step))
        together = decode_frames(policy, x, "random", rng, 0)
        parts = [
            decode_frames(policy, x[rows], "random", select_rows(rng, rows), 0) for rows in torch.arange(8).split(3)
        ]
        torch.testing.assert_close(together, torch.cat(parts))
        every = policy.decode(x)
        shown += [(every[row] == together[row]).flatten(1).all(1).nonzero().item() for row in range(8)]
    assert {*shown} == {0, 1, 2} and len({*shown[:8]}) > 1


def test_invalid_frames_are_refused() -> None:
    for wrong in (-1, (0, -2), ()):
        with pytest.raises(ValueError, match="expected frames from 0, or the word random"):
            RewardGradient(frames=wrong)
    with pytest.raises(ValueError, match="frame 7 of a video of 3"):
        select_frames((1, 7), 3)


@pytest.mark.parametrize(
    ("written", "found"), [("fml", "fml"), ("3", 3), ("[0, 4]", (0, 4)), ("alt", "alt"), ("random", "random")]
)
def test_frames_setting_takes_word_number_or_list(written: str, found: object) -> None:
    objective = load("reward-gradient-toy-video", [f"objective.frames={written}"]).objective
    assert isinstance(objective, RewardGradient) and objective.frames == found
