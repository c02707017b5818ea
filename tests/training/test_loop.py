"""The training loop: events, determinism, minibatches, EMA and samples."""

import inspect
from pathlib import Path

import pytest
import torch

import tastemaker
from tastemaker.cli import train as commands
from tastemaker.config.build import build
from tastemaker.config.load import load
from tastemaker.core.randomness import Randomness
from tastemaker.objectives.grpo import GRPO
from tastemaker.training.events import (
    CheckpointSaved,
    GuardChecked,
    SamplesGenerated,
    StepCompleted,
    TrainingFinished,
    TrainingStarted,
)
from tastemaker.training.loop import split_minibatches, train, train_step

PACKAGE = str(Path(tastemaker.__file__).parent)
SETTINGS = ["sample.every=0", "steps=2", "batch.prompts=8"]


def copy_weights(run) -> dict[str, torch.Tensor]:
    return {key: p.detach().clone() for key, p in run.policy.weights.trainable().items()}


def train_weights(recipe: str, directory: Path, *overrides: str) -> dict[str, torch.Tensor]:
    run = build(load(recipe, [*SETTINGS, *overrides]), directory)
    list(train(run))
    return copy_weights(run)


@pytest.mark.parametrize(
    "recipe",
    [
        "grpo-toy-flow",
        "grpo-toy-causal",
        "nft-toy-flow",
        "elbo-grpo-toy-flow",
        pytest.param("elbo-grpo-toy-masked", marks=pytest.mark.slow),
        pytest.param("flow-dppo-toy-flow", marks=pytest.mark.slow),
        pytest.param("grpo-toy-masked", marks=pytest.mark.slow),
        pytest.param("srpo-toy-flow", marks=pytest.mark.slow),
        "dgpo-toy-flow",
        pytest.param("crd-toy-flow", marks=pytest.mark.slow),
        pytest.param("ram-toy-flow", marks=pytest.mark.slow),
    ],
)
def test_micro_batches_and_rollout_chunks_change_only_rounding(recipe, tmp_path):
    start = copy_weights(build(load(recipe, SETTINGS), tmp_path / "start"))
    expected = train_weights(recipe, tmp_path / "expected")
    for setting in ("batch.rollout_batch_size=3", "batch.micro_batch_size=3"):
        weights = train_weights(recipe, tmp_path / setting, setting)
        for key, x in expected.items():
            # Adam moves a weight by the sign of its gradient, so rounding turns single weights whose gradient is near
            # zero. Relative to how far a tensor has moved, rounding is at most .25 % on the CPUs that were tried.
            error = (weights[key] - x).norm() / (x - start[key]).norm().clamp(min=1e-9)
            assert error < 0.01, f"{setting}, {key}: {error:.2%} of the change"


def test_training_is_deterministic(tmp_path):
    one, two = (train_weights("grpo-lora-toy-flow", tmp_path / name) for name in "ab")
    assert all(one[key].equal(two[key]) for key in one)


def test_another_seed_gives_other_weights(tmp_path):
    one, two = train_weights("grpo-toy-flow", tmp_path / "a"), train_weights("grpo-toy-flow", tmp_path / "b", "seed=1")
    assert any(not one[key].equal(two[key]) for key in one)


def test_minibatches_and_epochs_use_every_sample(tmp_path):
    run = build(load("grpo-toy-causal", [*SETTINGS, "batch.minibatches=4", "batch.epochs=2"]), tmp_path)
    event = train_step(run, 0).to_event()
    assert event.samples == 8 * run.objective.group_size
    assert event.metrics["ratio_deviation"] > 0  # later updates are off-policy


def test_events_come_in_order(tmp_path):
    settings = ["steps=2", "sample.every=1", "checkpoint.every=1", "guard.every=1", "batch.prompts=4"]
    event_types = [type(event) for event in train(build(load("grpo-toy-flow", settings), tmp_path))]
    step = [StepCompleted, SamplesGenerated, GuardChecked, CheckpointSaved]
    assert event_types == [TrainingStarted, SamplesGenerated, GuardChecked, *step, *step, TrainingFinished]


def test_ema_follows_the_live_weights(tmp_path):
    run = build(load("grpo-toy-flow", [*SETTINGS, "ema_decay=0.9", "sample.weights=ema"]), tmp_path)
    start = copy_weights(run)
    list(train(run))
    live, ema = copy_weights(run), run.policy.weights.snapshot_tensors()["ema"]
    key = max(live, key=lambda k: (live[k] - start[k]).abs().max().item())
    assert not ema[key].equal(live[key]) and not ema[key].equal(start[key])


def test_ema_decay_warms_up_with_every_update(tmp_path):
    settings = ["ema_decay=0.9", "batch.epochs=3", "batch.minibatches=2", "optim.lr=0.01"]
    run = build(load("grpo-toy-causal", [*SETTINGS, *settings]), tmp_path)
    expected, live, launch_step = copy_weights(run), [], run.engine.launch_step

    def record_weights(step):
        launched = launch_step(step)
        live.append(copy_weights(run))
        return launched

    run.engine.launch_step = record_weights
    for step in range(2):
        train_step(run, step)
    assert len(live) == 2 * 3 * 2
    for updates, weights in enumerate(live):
        decay = (1 + updates) / (10 + updates)  # below 0.9 for the first 80 updates
        expected = {key: decay * x + (1 - decay) * weights[key] for key, x in expected.items()}
    ema = run.policy.weights.snapshot_tensors()["ema"]
    assert ema.keys() == expected.keys()
    for key, x in expected.items():
        torch.testing.assert_close(ema[key], x, rtol=1e-5, atol=1e-6)


def test_samples_use_the_same_noise_at_every_step(tmp_path):
    run = build(load("grpo-toy-flow", ["steps=1", "sample.every=1", "optim.lr=0", "batch.prompts=4"]), tmp_path)
    first, last = (event.pixels for event in train(run) if isinstance(event, SamplesGenerated))
    assert first.equal(last)


def test_minibatches_are_shuffled_in_every_epoch():
    rng = Randomness(0, 0, torch.arange(16))
    first, second = (torch.cat(list(split_minibatches(16, 2, rng, epoch))) for epoch in (0, 1))
    assert first.sort().values.equal(torch.arange(16)) and second.sort().values.equal(torch.arange(16))
    assert not first.equal(second)


def test_train_command_reaches_the_loss_of_grpo_in_six_calls(tmp_path, monkeypatch):
    stacks: list[list[str]] = []
    original = GRPO.loss

    def loss(*arguments):
        frames = inspect.stack()[1:]
        stacks.append([frame.function for frame in reversed(frames) if frame.filename.startswith(PACKAGE)])
        return original(*arguments)

    monkeypatch.setattr(GRPO, "loss", loss)
    commands.train("grpo-toy-flow", [*SETTINGS, "steps=1", "guard.every=0", f"output_dir={tmp_path}"])
    assert [*stacks[0], "loss"] == ["train", "run_training", "train", "train_step", "update", "loss"]
