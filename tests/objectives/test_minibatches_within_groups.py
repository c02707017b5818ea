"""Updates on fewer samples than one group: advantages come before the cut, and micro-batches change only rounding."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tastemaker.config.build import build
from tastemaker.config.check import find_problems
from tastemaker.config.load import load
from tastemaker.config.step_counts import compute_step_counts
from tastemaker.core.registry import ConfigError
from tastemaker.objectives.advantages import group_advantages
from tastemaker.objectives.teacher_forced_grpo import TeacherForcedGRPO, split_groups
from tastemaker.training.loop import train_step

SETTINGS = ("sample.every=0", "guard.every=0", "steps=2", "optim.lr=1e-3")
TEACHER_FORCED = "teacher-forced-grpo-toy-causal"


def step_twice(recipe: str, directory: Path, *overrides: str) -> tuple[dict[str, Tensor], dict[str, float]]:
    run = build(load(recipe, [*SETTINGS, *overrides]), directory)
    events = [train_step(run, step).to_event() for step in range(2)]
    return {key: p.detach().clone() for key, p in run.policy.weights.trainable().items()}, events[-1].metrics


def assert_same(
    one: tuple[dict[str, Tensor], dict[str, float]], two: tuple[dict[str, Tensor], dict[str, float]]
) -> None:
    for key, x in one[0].items():
        torch.testing.assert_close(two[0][key], x, atol=2e-4, rtol=1e-3)  # Adam enlarges rounding
    for name in ("loss/policy", "grad_norm", "reward/mean", "zero_std_groups"):
        assert two[1][name] == pytest.approx(one[1][name], abs=1e-5, rel=1e-4)


def test_one_prompt_in_two_minibatches_does_not_depend_on_the_micro_batch_size(tmp_path: Path) -> None:
    batch = ("batch.prompts=1", "batch.minibatches=2", "batch.epochs=2")
    runs = [
        step_twice("grpo-toy-causal", tmp_path / str(size), *batch, f"batch.micro_batch_size={size}")
        for size in (4, 3, 1)
    ]
    for other in runs[1:]:
        assert_same(runs[0], other)
    assert runs[0][1]["ratio_deviation"] > 0  # the second minibatch is off-policy


def test_samples_per_call_and_micro_batch_size_change_only_rounding(tmp_path: Path) -> None:
    settings = ("batch.prompts=4", "objective.token_dropout=0.5", "objective.kl_coef=0.1")
    expected = step_twice(TEACHER_FORCED, tmp_path / "groups", *settings)
    for calls, size in ((4, 3), (1, 5)):
        split = (f"objective.samples_per_call={calls}", f"batch.micro_batch_size={size}")
        assert_same(expected, step_twice(TEACHER_FORCED, tmp_path / str(calls), *settings, *split))


def test_split_groups_keep_the_advantages_of_whole_groups(tmp_path: Path) -> None:
    run = build(load(TEACHER_FORCED, [*SETTINGS, "batch.prompts=2"]), tmp_path)
    context, batch = run.context(0, 2), run.data.batch(0, 2, 0, 1)
    objective = run.objective
    assert isinstance(objective, TeacherForcedGRPO)
    whole = objective.collect(context, batch)
    split = replace(objective, samples_per_call=4).collect(context, batch)
    assert len(split) == 4 and split.samples.shape[:2] == (4, 4)
    expected = group_advantages(whole.reward.flatten(), 8, unbiased_std=True, eps=1e-8)
    torch.testing.assert_close(split.advantage.flatten(), expected.clamp(-5, 5))
    assert split.samples.view_as(whole.samples).equal(whole.samples)
    mixed = replace(objective, own_token_ratio=0.5).collect(context, batch)  # each sample has a context of its own
    assert split_groups(mixed, 2).context.view_as(mixed.context).equal(mixed.context)


def test_published_quick_start_makes_sixteen_updates_on_four_samples(tmp_path: Path) -> None:
    config = load("grpo-llamagen-tf-quickstart", ["engine.precision=fp32", "sample.every=0", "guard.every=0"])
    assert find_problems(config, world_size=1) == []
    counts = compute_step_counts(config)
    assert (counts.prompts, counts.samples, counts.updates, counts.minibatch_size) == (8, 64, 16, 4)
    assert isinstance(config.objective, TeacherForcedGRPO) and config.objective.samples_per_call == 4
    run = build(config, tmp_path, tiny=True)
    step = train_step(run, 0)
    assert len(step.updates) == 16 and step.to_event().samples == 64


def test_minibatches_divide_the_samples_of_a_rank() -> None:
    (problem,) = find_problems(load("grpo-toy-causal", ["batch.prompts=1", "batch.minibatches=3"]), world_size=1)
    assert "batch.minibatches" in problem and "TM794" in problem
    assert find_problems(load("grpo-toy-causal", ["batch.prompts=2", "batch.minibatches=8"]), world_size=2) == []
    with pytest.raises(ConfigError, match=r"samples_per_call.*TM860"):
        load(TEACHER_FORCED, ["objective.samples_per_call=3"])
