"""A run that fails between two steps saves a checkpoint."""

from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from tastemaker.autoencoders import training
from tastemaker.config.build import build, build_autoencoder
from tastemaker.config.load import load, load_any_config
from tastemaker.core.registry import ConfigError
from tastemaker.data.dataset import Dataset
from tastemaker.training import checkpoint
from tastemaker.training.events import CheckpointSaved, StepCompleted
from tastemaker.training.loop import train

SETTINGS = ["sample.every=0", "steps=6", "guard.every=0", "batch.prompts=4", "checkpoint.every=100"]


class FailingDataset(Dataset):
    """A dataset that fails after some steps."""

    def __init__(self, data: Any, steps: int, error: Exception) -> None:
        self.data, self.steps, self.error = data, steps, error

    def __len__(self) -> int:
        return len(self.data)

    def batch(self, step: int, batch_size: int, rank: int, world_size: int) -> Any:
        if step >= self.steps:
            raise self.error
        return self.data.batch(step, batch_size, rank, world_size)

    def first_prompts(self, count: int) -> Any:
        return self.data.first_prompts(count)


def train_until_failure(directory: Path, steps: int, error: Exception) -> tuple[Any, list[Any], Exception]:
    run, events = build(load("likelihood-toy-flow", SETTINGS), directory), []
    run.data = FailingDataset(run.data, steps, error)
    with pytest.raises(type(error)) as caught:
        events.extend(train(run))
    return run, events, caught.value


def test_failing_data_saves_a_checkpoint_that_resumes_exactly(tmp_path):
    _, events, error = train_until_failure(tmp_path / "a", 3, ConfigError("data: 3.png cannot be read; remove it"))
    assert isinstance(events[-1], CheckpointSaved) and events[-1].step == 3
    assert str(error).startswith("data: 3.png cannot be read; remove it") and "step 3 " in str(error)
    resumed = build(load("likelihood-toy-flow", SETTINGS), tmp_path / "a")
    resumed.resume(checkpoint.latest_checkpoint(resumed.directory))
    assert [event.step for event in train(resumed) if isinstance(event, StepCompleted)] == [4, 5, 6]
    uninterrupted = build(load("likelihood-toy-flow", SETTINGS), tmp_path / "b")
    list(train(uninterrupted))
    weights, expected = (x.policy.weights.trainable() for x in (resumed, uninterrupted))
    assert all(torch.equal(weights[key], expected[key]) for key in weights)


def test_other_failures_between_steps_save_a_checkpoint(tmp_path):
    _, events, error = train_until_failure(tmp_path, 2, OSError("the disk is gone"))
    assert isinstance(events[-1], CheckpointSaved) and str(error) == "the disk is gone"


def test_no_checkpoint_without_a_completed_step(tmp_path):
    _, events, error = train_until_failure(tmp_path, 0, ConfigError("data: there is none"))
    assert not any(isinstance(event, CheckpointSaved) for event in events) and str(error) == "data: there is none"


def test_no_checkpoint_in_the_middle_of_a_step(tmp_path):
    run, events = build(load("likelihood-toy-flow", SETTINGS), tmp_path), []
    launch = run.engine.launch_step

    def failing_launch(step: int) -> Any:
        if step == 2:
            raise OSError("unplugged")
        return launch(step)

    run.engine.launch_step = failing_launch
    with pytest.raises(OSError, match="unplugged"):
        events.extend(train(run))
    assert not any(isinstance(event, CheckpointSaved) for event in events) and not run.step_complete


def test_failing_autoencoder_run_saves_a_checkpoint(tmp_path):
    images = tmp_path / "images"
    images.mkdir()
    for number in range(6):
        Image.new("RGB", (32, 32), (40 * number, 90, 30)).save(images / f"{number}.png")
    (images / "5.png").write_text("no image")
    settings = [
        f"data={{type: image_collection, path: {images}, image_size: 32}}",
        "autoencoder={type: vae, latent_channels: 4, width: 8, downsample_factor: 8}",
        "discriminator=null", "validation=null", "batch_size=1", "steps=20", "sample.every=0", "checkpoint.every=100",
        "engine={device: cpu, precision: fp32}",
    ]  # fmt: skip
    run, events = build_autoencoder(load_any_config("vae-playground", settings), tmp_path / "run"), []
    with pytest.raises(ConfigError, match=r"TM191"):
        events.extend(training.train(run))
    assert isinstance(events[-1], CheckpointSaved) and events[-1].step == events[-2].step > 0
