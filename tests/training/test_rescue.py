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

QUIET = ["sample.every=0", "steps=6", "guard.every=0", "batch.prompts=4", "checkpoint.every=100"]


class Ending(Dataset):
    """A dataset that fails after some steps."""

    def __init__(self, data: Any, steps: int, error: Exception) -> None:
        self.data, self.steps, self.error = data, steps, error

    def __len__(self) -> int:
        return len(self.data)

    def batch(self, step: int, size: int, rank: int, world: int) -> Any:
        if step >= self.steps:
            raise self.error
        return self.data.batch(step, size, rank, world)

    def first_prompts(self, count: int) -> Any:
        return self.data.first(count)


def ended(place: Path, steps: int, error: Exception) -> tuple[Any, list[Any], Exception]:
    run, received = build(load("likelihood-toy-flow", QUIET), place), []
    run.data = Ending(run.data, steps, error)
    with pytest.raises(type(error)) as result:
        received.extend(train(run))
    return run, received, result.value


def test_failing_data_saves_a_checkpoint_that_resumes_exactly(tmp_path):
    _, received, error = ended(tmp_path / "a", 3, ConfigError("data: 3.png cannot be read; remove it"))
    assert isinstance(received[-1], CheckpointSaved) and received[-1].step == 3
    assert str(error).startswith("data: 3.png cannot be read; remove it; step 3 is saved")
    again = build(load("likelihood-toy-flow", QUIET), tmp_path / "a")
    again.resume(checkpoint.latest_checkpoint(again.directory))
    assert [event.step for event in train(again) if isinstance(event, StepCompleted)] == [4, 5, 6]
    whole = build(load("likelihood-toy-flow", QUIET), tmp_path / "b")
    list(train(whole))
    one, two = (x.policy.weights.trainable() for x in (again, whole))
    assert all(torch.equal(one[key], two[key]) for key in one)


def test_other_failures_between_steps_save_a_checkpoint(tmp_path):
    _, received, error = ended(tmp_path, 2, OSError("the disk is gone"))
    assert isinstance(received[-1], CheckpointSaved) and str(error) == "the disk is gone"


def test_no_checkpoint_without_a_completed_step(tmp_path):
    _, received, error = ended(tmp_path, 0, ConfigError("data: there is none"))
    assert not any(isinstance(event, CheckpointSaved) for event in received) and str(error) == "data: there is none"


def test_no_checkpoint_in_the_middle_of_a_step(tmp_path):
    run, received = build(load("likelihood-toy-flow", QUIET), tmp_path), []
    launch = run.engine.launch_step

    def fails(step: int) -> Any:
        if step == 2:
            raise OSError("unplugged")
        return launch(step)

    run.engine.launch_step = fails
    with pytest.raises(OSError, match="unplugged"):
        received.extend(train(run))
    assert not any(isinstance(event, CheckpointSaved) for event in received) and not run.step_complete


def test_failing_autoencoder_run_saves_a_checkpoint(tmp_path):
    pictures = tmp_path / "pictures"
    pictures.mkdir()
    for number in range(6):
        Image.new("RGB", (32, 32), (40 * number, 90, 30)).save(pictures / f"{number}.png")
    (pictures / "5.png").write_text("no picture")
    settings = [
        f"data={{type: image_collection, path: {pictures}, image_size: 32}}",
        "autoencoder={type: vae, latent_channels: 4, width: 8, downsample_factor: 8}",
        "discriminator=null", "validation=null", "batch_size=1", "steps=20", "sample.every=0", "checkpoint.every=100",
        "engine={device: cpu, precision: fp32}",
    ]  # fmt: skip
    run, received = build_autoencoder(load_any_config("vae-playground", settings), tmp_path / "run"), []
    with pytest.raises(ConfigError, match=r"5.png.*step \d+ is saved"):
        received.extend(training.train(run))
    assert isinstance(received[-1], CheckpointSaved) and received[-1].step == received[-2].step > 0
