"""Training of autoregressive generators on several ranks equals one rank, and resumes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from launch_ranks import finish, launch
from test_run_ranks import assert_close, read_tensors

pytestmark = [pytest.mark.slow, pytest.mark.ranks, pytest.mark.xdist_group("ranks")]
SMALL = (
    *(
        "model.variant=tiny",
        "model.weights=null",
        "model.autoencoder=null",
        "model.image_size=32",
        "model.downsample_factor=8",
    ),
    *(
        "model.codebook_size=64",
        "data.image_size=32",
        "engine.precision=fp32",
        "engine.reduce_dtype=fp32",
        "guard.every=0",
    ),
)
CASES = {
    "teacher-forced-grpo-toy-causal": ("guard.every=0",),
    "cca-toy-causal": ("guard.every=0",),
    "grpo-llamagen-tf": (*SMALL, "batch.minibatches=1", "optim.lr=1e-3"),
}
Tensors = dict[str, torch.Tensor]


def final_weights(directory: Path) -> Tensors:
    return read_tensors(directory / "checkpoints/step-000004", "weights")


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tensors]:
    directories = {recipe: tmp_path_factory.mktemp(recipe) for recipe in CASES}
    for recipe, directory in directories.items():
        finish(launch(recipe, directory, "steps=4", *CASES[recipe]))
    return {recipe: final_weights(directory) for recipe, directory in directories.items()}


@pytest.mark.parametrize("recipe", ["teacher-forced-grpo-toy-causal", "cca-toy-causal"])
def test_causal_training_on_two_ranks_equals_one(recipe: str, one_rank: dict[str, Tensors], tmp_path: Path) -> None:
    finish(launch(recipe, tmp_path, "steps=4", "engine.strategy=fsdp", *CASES[recipe], ranks=2))
    assert_close(one_rank[recipe], final_weights(tmp_path))


# Micro-batches of 3 rows cut through groups of 8 samples, and rows of 4 samples are half a group.
CUT_GROUPS = {
    "grpo-toy-causal": ("batch.prompts=2", "batch.micro_batch_size=3"),
    "gcpo-toy-causal": ("batch.prompts=2", "batch.micro_batch_size=3"),
    "teacher-forced-grpo-toy-causal": (
        *("batch.prompts=4", "objective.samples_per_call=4", "objective.token_dropout=0.5", "batch.micro_batch_size=3"),
    ),
}


@pytest.mark.parametrize("recipe", CUT_GROUPS)
def test_cut_groups_on_two_ranks_equal_one(recipe: str, tmp_path: Path) -> None:
    settings = ("steps=4", "guard.every=0", *CUT_GROUPS[recipe])
    for ranks in (1, 2):
        finish(launch(recipe, tmp_path / str(ranks), *settings, ranks=ranks))
    assert_close(final_weights(tmp_path / "1"), final_weights(tmp_path / "2"))


@pytest.mark.parametrize(
    ("strategy", "ranks", "format"), [("sdp", 2, "consolidated"), ("fsdp", 2, "sharded"), ("hsdp", 4, "sharded")]
)
def test_llamagen_resumes_on_another_number_of_ranks(
    strategy: str, ranks: int, format: str, one_rank: dict[str, Tensors], tmp_path: Path
) -> None:
    recipe = "grpo-llamagen-tf"
    settings = (*CASES[recipe], f"engine.strategy={strategy}", f"checkpoint.format={format}")
    for steps in (2, 4):
        finish(launch(recipe, tmp_path, f"steps={steps}", *settings, ranks=ranks))
    assert_close(one_rank[recipe], final_weights(tmp_path))
