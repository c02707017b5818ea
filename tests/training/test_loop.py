"""What the loop promises whatever it runs on."""

from pathlib import Path

import pytest
import torch

from tastemaker.config.build import build
from tastemaker.config.load import load
from tastemaker.core.randomness import Randomness
from tastemaker.training.events import (
    CheckpointSaved,
    GuardChecked,
    SamplesGenerated,
    StepCompleted,
    TrainingFinished,
    TrainingStarted,
)
from tastemaker.training.loop import split_minibatches, train, train_step

QUIET = ["sample.every=0", "steps=2", "batch.prompts=8"]


def weights(run) -> dict[str, torch.Tensor]:
    return {key: p.detach().clone() for key, p in run.policy.weights.trainable().items()}


def trained(recipe: str, place: Path, *overrides: str) -> dict[str, torch.Tensor]:
    run = build(load(recipe, [*QUIET, *overrides]), place)
    list(train(run))
    return weights(run)


@pytest.mark.parametrize(
    "recipe",
    [
        "grpo-toy-flow",
        "grpo-toy-causal",
        "nft-toy-flow",
        pytest.param("grpo-toy-masked", marks=pytest.mark.slow),
        pytest.param("srpo-toy-flow", marks=pytest.mark.slow),
    ],
)
def test_cutting_a_step_in_chunks_changes_only_rounding(recipe, tmp_path):
    whole = trained(recipe, tmp_path / "whole")
    for cut in ("batch.rollout=3", "batch.microbatch=3"):
        chunked = trained(recipe, tmp_path / cut, cut)
        for key, x in whole.items():
            torch.testing.assert_close(chunked[key], x, atol=2e-4, rtol=1e-3, msg=lambda m: f"{cut}, {key}: {m}")  # noqa: B023


def test_the_same_run_twice_is_the_same_to_the_bit(tmp_path):
    one, two = (trained("grpo-lora-toy-flow", tmp_path / name) for name in "ab")
    assert all(one[key].equal(two[key]) for key in one)


def test_another_seed_is_another_run(tmp_path):
    one, two = trained("grpo-toy-flow", tmp_path / "a"), trained("grpo-toy-flow", tmp_path / "b", "seed=1")
    assert any(not one[key].equal(two[key]) for key in one)


def test_several_updates_and_epochs_pass_over_every_row(tmp_path):
    run = build(load("grpo-toy-causal", [*QUIET, "batch.updates=4", "batch.epochs=2"]), tmp_path)
    seen = train_step(run, 0)
    assert seen.samples == 8 * run.objective.group
    assert seen.metrics["ratio_off"] > 0  # later updates see weights that have moved


def test_events_come_in_order(tmp_path):
    often = ["steps=2", "sample.every=1", "checkpoint.every=1", "guard.every=1", "batch.prompts=4"]
    kinds = [type(event) for event in train(build(load("grpo-toy-flow", often), tmp_path))]
    step = [StepCompleted, SamplesGenerated, GuardChecked, CheckpointSaved]
    assert kinds == [TrainingStarted, SamplesGenerated, GuardChecked, *step, *step, TrainingFinished]


def test_the_average_follows_the_live_weights(tmp_path):
    run = build(load("grpo-toy-flow", [*QUIET, "ema=0.9", "sample.use=ema"]), tmp_path)
    start = weights(run)
    list(train(run))
    live, average = weights(run), run.policy.weights.stored()["ema"]
    key = max(live, key=lambda k: (live[k] - start[k]).abs().max().item())
    assert not average[key].equal(live[key]) and not average[key].equal(start[key])


def test_samples_to_look_at_come_from_the_same_noise(tmp_path):
    run = build(load("grpo-toy-flow", ["steps=1", "sample.every=1", "optim.lr=0", "batch.prompts=4"]), tmp_path)
    first, last = (event.pixels for event in train(run) if isinstance(event, SamplesGenerated))
    assert first.equal(last)


def test_minibatches_are_shuffled_anew_every_epoch():
    rng = Randomness(0, 0, torch.arange(16))
    first, second = (torch.cat(list(split_minibatches(16, 2, rng, epoch))) for epoch in (0, 1))
    assert first.sort().values.equal(torch.arange(16)) and second.sort().values.equal(torch.arange(16))
    assert not first.equal(second)
