"""Reward gradients: which network calls are in the graph, and which frames are scored."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import toys

from tastemaker.config.load import load
from tastemaker.core.policy import Policy
from tastemaker.core.randomness import Purpose, Randomness
from tastemaker.core.types import Placement
from tastemaker.core.weights import FullFinetuning
from tastemaker.models.toy import ToyFlowSpec
from tastemaker.objectives.reward_gradient import RewardGradient
from tastemaker.objectives.scored_frames import decode_frames, select_frames
from tastemaker.processes.dynamics import ODE
from tastemaker.processes.gaussian import GaussianProcess
from tastemaker.processes.paths import RectifiedFlow


def calls_with_gradient(objective: RewardGradient, step: int = 0) -> list[bool]:
    """Return for each network call of a training step whether it is in the graph."""
    policy = toys.policy("flow")
    calls: list[bool] = []
    policy.model.net.register_forward_hook(lambda net, inputs, output: calls.append(output.requires_grad))
    ctx = toys.context(policy, 4, step=step)
    toys.backward(objective, ctx, objective.collect(ctx, toys.prompts(4)))
    return calls


def mask_of(*indices: int, length: int = 8) -> list[bool]:
    return [i in indices for i in range(length)]


def test_last_steps_mode_keeps_final_graph() -> None:
    assert calls_with_gradient(RewardGradient()) == mask_of(7)
    assert calls_with_gradient(RewardGradient(last_steps=3)) == mask_of(5, 6, 7)
    assert (
        calls_with_gradient(RewardGradient(last_steps=8))
        == calls_with_gradient(RewardGradient(last_steps=20))
        == [True] * 8
    )


def test_from_step_mode_starts_graph_at_step() -> None:
    assert calls_with_gradient(RewardGradient(gradient_mode="from_step", from_step=5)) == mask_of(5, 6, 7)


def test_random_mode_starts_graph_at_any_step() -> None:
    masks = {tuple(calls_with_gradient(RewardGradient(gradient_mode="random"), step)) for step in range(40)}
    assert masks == {tuple(mask_of(*range(first, 8))) for first in range(8)}


def test_steps_mode_keeps_listed_steps_only() -> None:
    assert calls_with_gradient(RewardGradient(gradient_mode="steps", steps=(2, 5))) == mask_of(2, 5)


def test_single_step_mode_ends_the_rollout() -> None:
    for step in range(10):
        calls = calls_with_gradient(RewardGradient(gradient_mode="single_step", step_range=(4, 6)), step)
        assert 5 <= len(calls) <= 7
        assert calls == mask_of(len(calls) - 1, length=len(calls))


def test_renoise_mode_costs_one_call_per_copy() -> None:
    assert calls_with_gradient(RewardGradient(gradient_mode="renoise", num_renoise=3)) == [False] * 8 + [True] * 3


def test_renoise_mode_uses_the_last_timestep() -> None:
    assert RewardGradient(gradient_mode="renoise").first_step(Randomness(0, 0, torch.arange(4)), 8) == 7


def test_renoise_draws_new_noise_per_copy_and_epoch() -> None:
    objective, ctx = RewardGradient(gradient_mode="renoise", num_renoise=2), toys.context(toys.policy("flow"), 4)
    experience = objective.collect(ctx, toys.prompts(4))
    losses = [objective.loss(replace(ctx, epoch=e), experience, part).rows for e in (0, 1) for part in (0, 1)]
    assert len({tuple(loss.tolist()) for loss in losses}) == 4


def test_truncated_normal_start_step_is_shared_by_ranks() -> None:
    objective = RewardGradient(gradient_mode="truncated_normal", start_step_mean=42.0, start_step_std=5.0)
    steps = [objective.first_step(Randomness(0, step, torch.arange(4)), 50) for step in range(400)]
    steps_of_other_rank = [objective.first_step(Randomness(0, step, torch.arange(4) + 4), 50) for step in range(400)]
    assert steps == steps_of_other_rank
    assert min(steps) >= 1
    assert max(steps) <= 49
    assert sum(steps) / len(steps) == pytest.approx(41, abs=1)  # truncated to integers and at the last step


@pytest.mark.parametrize(
    "objective",
    [
        RewardGradient(gradient_mode="from_step", from_step=8),
        RewardGradient(gradient_mode="single_step", step_range=(4, 9)),
        RewardGradient(gradient_mode="steps", steps=(2, 9)),
    ],
)
def test_step_beyond_the_sampler_is_refused(objective: RewardGradient) -> None:
    with pytest.raises(ValueError, match=r"step \d.* 8 steps.*TM316"):
        calls_with_gradient(objective)


@pytest.mark.parametrize("detach_input", [True, False])
def test_detach_input_keeps_the_skip_gradient(detach_input: bool) -> None:
    """The next latent of rectified flow is x plus a multiple of the velocity; if that is detached, d next / dx is 1."""
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


def tiny_policy() -> Policy[Any]:
    model = ToyFlowSpec().tiny().load(Placement())
    return Policy(model, GaussianProcess(RectifiedFlow(), ODE(), 3), FullFinetuning().apply(model, ()))


@pytest.mark.parametrize(
    "objective", [RewardGradient(last_steps=3), RewardGradient(last_steps=3, reward_threshold=0.9, loss_scale=2.0)]
)
def test_gradient_through_sampler_matches_finite_differences(objective: RewardGradient) -> None:
    policy = tiny_policy()
    ctx = toys.context(policy, 8)
    experience = objective.collect(ctx, toys.prompts(8))
    parameters = list(policy.weights.trainable().values())
    gradient = torch.autograd.grad(objective.loss(ctx, experience, 0).rows.sum(), parameters)
    norm = torch.cat([g.flatten() for g in gradient]).norm()

    @torch.no_grad()
    def loss_at(distance: float) -> float:
        for p, g in zip(parameters, gradient, strict=True):
            p.add_(distance * g / norm)
        value = float(objective.loss(ctx, experience, 0).rows.double().sum())
        for p, g in zip(parameters, gradient, strict=True):
            p.sub_(distance * g / norm)
        return value

    step = 1e-2  # large enough for float32, small enough for a linear approximation
    assert (loss_at(step) - loss_at(-step)) / (2 * step) == pytest.approx(float(norm), rel=1e-2)


def test_rewards_above_threshold_have_no_gradient() -> None:
    ctx = toys.context(toys.policy("flow"), 8)
    experience = RewardGradient().collect(ctx, toys.prompts(8))
    plain, limited = (RewardGradient(reward_threshold=threshold).loss(ctx, experience, 0) for threshold in (None, 0.6))
    torch.testing.assert_close(limited.rows, (0.6 + plain.rows).relu())
    torch.testing.assert_close(plain.rows, -plain.metrics["reward/mean"])
    assert (limited.rows == 0).any()


@pytest.mark.parametrize(
    ("frames", "indices"),
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
def test_only_selected_frames_are_scored(frames: Any, indices: list[int]) -> None:
    policy = toys.policy("video")
    ctx = toys.context(policy, 4)
    experience = RewardGradient().collect(ctx, toys.prompts(4))
    rewards = RewardGradient(frames=frames).loss(ctx, experience, 0).metrics["reward/mean"]
    video = policy.decode(policy.sample(experience.cond, experience.rng).final)[:, indices]
    torch.testing.assert_close(rewards, ctx.rubric.score(video, toys.PROMPTS).total, rtol=1e-4, atol=1e-5)


def test_negative_steps_are_refused() -> None:
    for settings in ({"gradient_mode": "from_step", "from_step": -1}, {"gradient_mode": "steps", "steps": (2, -1)}):
        with pytest.raises(ValueError, match=r"from_step.*steps.*-1|from_step.*-1.*steps.*TM088"):
            RewardGradient(**settings)


def test_named_frames_of_a_longer_video() -> None:
    assert select_frames("fml", 16) == [0, 8, 15]
    assert select_frames("fml", 1) == [0]
    assert select_frames("alt", 7) == [0, 2, 4, 6]
    assert select_frames("all", 7) is None


def test_random_frame_per_video_does_not_depend_on_batches() -> None:
    policy = toys.policy("video")
    scored_frames: list[Any] = []
    for step in range(12):
        rng = Randomness(0, step, torch.arange(8))
        x = torch.randn(8, *policy.model.shape, generator=torch.Generator().manual_seed(step))
        uniform = rng.uniform(Purpose.FRAME, 1).flatten()
        full = decode_frames(policy, x, "random", uniform)
        chunks = [decode_frames(policy, x[rows], "random", uniform[rows]) for rows in torch.arange(8).split(3)]
        torch.testing.assert_close(full, torch.cat(chunks))
        frames = policy.decode(x)
        scored_frames += [(frames[row] == full[row]).flatten(1).all(1).nonzero().item() for row in range(8)]
    assert {*scored_frames} == {0, 1, 2} and len({*scored_frames[:8]}) > 1


def test_invalid_frames_are_refused() -> None:
    for frames in (-1, (0, -2), ()):
        with pytest.raises(ValueError, match=r"'frames' is .*TM317"):
            RewardGradient(frames=frames)
    with pytest.raises(ValueError, match=r"frame 7\b.* 3.*TM318"):
        select_frames((1, 7), 3)


@pytest.mark.parametrize(
    ("value", "expected"), [("fml", "fml"), ("3", 3), ("[0, 4]", (0, 4)), ("alt", "alt"), ("random", "random")]
)
def test_frames_setting_takes_word_number_or_list(value: str, expected: object) -> None:
    objective = load("reward-gradient-toy-video", [f"objective.frames={value}"]).objective
    assert isinstance(objective, RewardGradient) and objective.frames == expected
