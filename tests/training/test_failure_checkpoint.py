"""A run that cannot go on keeps what it has learned."""

from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from tastemaker.autoencoders import training
from tastemaker.config.build import build, build_autoencoder
from tastemaker.config.load import load, load_any_config
from tastemaker.core.registry import ConfigError
from tastemaker.training import checkpoint
from tastemaker.training.events import CheckpointSaved, StepCompleted
from tastemaker.training.loop import train

QUIET = ["sample.every=0", "steps=6", "guard.every=0", "batch.prompts=4", "checkpoint.every=100"]


class Ending:
    """Data that last for so many steps."""

    def __init__(self, data: Any, steps: int, error: Exception) -> None:
        self.data, self.steps, self.error = data, steps, error

    def __len__(self) -> int:
        return len(self.data)

    def batch(self, step: int, size: int, rank: int, world: int) -> Any:
        if step >= self.steps:
            raise self.error
        return self.data.batch(step, size, rank, world)

    def first(self, count: int) -> Any:
        return self.data.first(count)


def ended(place: Path, steps: int, error: Exception) -> tuple[Any, list[Any], Exception]:
    run, seen = build(load("likelihood-toy-flow", QUIET), place), []
    run.data = Ending(run.data, steps, error)
    with pytest.raises(type(error)) as found:
        seen.extend(train(run))
    return run, seen, found.value


def test_a_run_whose_data_fail_is_saved_and_goes_on_as_if_nothing_had_happened(tmp_path):
    _, seen, error = ended(tmp_path / "a", 3, ConfigError("data: 3.png cannot be read; remove it"))
    assert isinstance(seen[-1], CheckpointSaved) and seen[-1].step == 3
    assert str(error).startswith("data: 3.png cannot be read; remove it; step 3 is saved, from which the same command")
    again = build(load("likelihood-toy-flow", QUIET), tmp_path / "a")
    again.resume(checkpoint.latest(again.directory))
    assert [event.step for event in train(again) if isinstance(event, StepCompleted)] == [4, 5, 6]
    whole = build(load("likelihood-toy-flow", QUIET), tmp_path / "b")
    list(train(whole))
    one, two = (x.policy.weights.trainable() for x in (again, whole))
    assert all(torch.equal(one[key], two[key]) for key in one)


def test_whatever_else_fails_between_two_steps_does_too(tmp_path):
    _, seen, error = ended(tmp_path, 2, OSError("the disk is gone"))
    assert isinstance(seen[-1], CheckpointSaved) and str(error) == "the disk is gone"


def test_nothing_is_saved_where_nothing_was_learned_since(tmp_path):
    _, seen, error = ended(tmp_path, 0, ConfigError("data: there is none"))
    assert not any(isinstance(event, CheckpointSaved) for event in seen) and str(error) == "data: there is none"


def test_a_step_that_fails_halfway_is_not_saved(tmp_path):
    run, seen = build(load("likelihood-toy-flow", QUIET), tmp_path), []
    launch = run.engine.launch

    def fails(step: int) -> Any:
        if step == 2:
            raise OSError("unplugged")
        return launch(step)

    run.engine.launch = fails
    with pytest.raises(OSError, match="unplugged"):
        seen.extend(train(run))
    assert not any(isinstance(event, CheckpointSaved) for event in seen) and not run.whole


def test_an_autoencoder_is_saved_likewise(tmp_path):
    pictures = tmp_path / "pictures"
    pictures.mkdir()
    for number in range(6):
        Image.new("RGB", (32, 32), (40 * number, 90, 30)).save(pictures / f"{number}.png")
    (pictures / "5.png").write_text("no picture")
    settings = [
        f"data={{type: gallery, path: {pictures}, size: 32}}",
        "autoencoder={type: vae, channels: 4, width: 8, factor: 8}",
        "critic=null", "validation=null", "rows=1", "steps=20", "sample.every=0", "checkpoint.every=100",
        "engine={device: cpu, precision: fp32}",
    ]  # fmt: skip
    run, seen = build_autoencoder(load_any_config("vae-playground", settings), tmp_path / "run"), []
    with pytest.raises(ConfigError, match=r"5.png.*step \d+ is saved"):
        seen.extend(training.train(run))
    assert isinstance(seen[-1], CheckpointSaved) and seen[-1].step == seen[-2].step > 0
