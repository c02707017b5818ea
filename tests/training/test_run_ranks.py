"""Runs on several ranks equal the run on one rank, and resume on another number of ranks."""

from pathlib import Path

import pytest
import torch
from launch_ranks import finish, launch
from safetensors.torch import load_file

pytestmark = pytest.mark.ranks
RECIPE = "grpo-toy-causal"


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory) -> dict[str, torch.Tensor]:
    directory = tmp_path_factory.mktemp("one_rank")
    finish(launch(RECIPE, directory, "steps=4", "ema_decay=0.9"))
    return final_tensors(directory)


def final_tensors(directory: Path) -> dict[str, torch.Tensor]:
    checkpoint = directory / "checkpoints/step-000004"
    return {
        f"{name}/{key}": x for name in ("weights", "snapshots/ema") for key, x in read_tensors(checkpoint, name).items()
    }


def read_tensors(checkpoint: Path, name: str) -> dict[str, torch.Tensor]:
    if (checkpoint / f"{name}.safetensors").is_file():
        return load_file(checkpoint / f"{name}.safetensors")
    shards = [load_file(file) for file in sorted((checkpoint / name).glob("*.safetensors"))]
    return {key: torch.cat([shard[key] for shard in shards if key in shard]) for key in shards[0]}


def assert_close(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    for key, x in one.items():
        torch.testing.assert_close(x, other[key], atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize(
    ("strategy", "ranks", "format"),
    [
        ("replicated", 2, "consolidated"),
        ("fsdp", 2, "sharded"),
        pytest.param("sdp", 2, "consolidated", marks=pytest.mark.slow),
        pytest.param("hsdp", 4, "sharded", marks=pytest.mark.slow),
    ],
)
def test_training_on_several_ranks_equals_one(strategy, ranks, format, one_rank, tmp_path):
    settings = ("steps=4", "ema_decay=0.9", f"engine.strategy={strategy}", f"checkpoint.format={format}")
    finish(launch(RECIPE, tmp_path, *settings, ranks=ranks))
    assert_close(one_rank, final_tensors(tmp_path))


@pytest.mark.slow
def test_run_resumes_on_another_number_of_ranks(one_rank, tmp_path):
    finish(
        launch(
            RECIPE, tmp_path, "steps=2", "ema_decay=0.9", "engine.strategy=fsdp", "checkpoint.format=sharded", ranks=2
        )
    )
    finish(launch(RECIPE, tmp_path, "steps=4", "ema_decay=0.9"))
    assert_close(one_rank, final_tensors(tmp_path))


@pytest.mark.parametrize(
    ("recipe", "strategy"),
    [
        ("awm-toy-flow", "fsdp"),
        pytest.param("elbo-grpo-toy-masked", "replicated", marks=pytest.mark.slow),
        pytest.param("elbo-grpo-toy-flow", "fsdp", marks=pytest.mark.slow),
        pytest.param("epg-toy-flow", "replicated", marks=pytest.mark.slow),
        pytest.param("flow-dppo-toy-flow", "fsdp", marks=pytest.mark.slow),
        pytest.param("grpo-guard-toy-flow", "replicated", marks=pytest.mark.slow),
        pytest.param("drpo-toy-causal", "fsdp", marks=pytest.mark.slow),
    ],
)
def test_objective_on_two_ranks_equals_one(recipe, strategy, tmp_path):
    """Levels and noise that samples share are the same on all ranks, and ratios are those of whole samples."""
    settings = ("steps=4", "ema_decay=0.9", "batch.minibatches=1", "batch.epochs=2")
    finish(launch(recipe, tmp_path / "one", *settings))
    finish(launch(recipe, tmp_path / "two", *settings, f"engine.strategy={strategy}", ranks=2))
    assert_close(final_tensors(tmp_path / "one"), final_tensors(tmp_path / "two"))
