"""Autoregressive generators train on several ranks as on one, and resume."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from launch_ranks import finish, launch
from test_run_ranks import close, read

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


def trained(place: Path) -> Tensors:
    return read(place / "checkpoints/step-000004", "weights")


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tensors]:
    places = {recipe: tmp_path_factory.mktemp(recipe) for recipe in CASES}
    for recipe, place in places.items():
        finish(launch(recipe, place, "steps=4", *CASES[recipe]))
    return {recipe: trained(place) for recipe, place in places.items()}


@pytest.mark.parametrize("recipe", ["teacher-forced-grpo-toy-causal", "cca-toy-causal"])
def test_causal_training_on_two_ranks_equals_one(recipe: str, alone: dict[str, Tensors], tmp_path: Path) -> None:
    finish(launch(recipe, tmp_path, "steps=4", "engine.strategy=fsdp", *CASES[recipe], ranks=2))
    close(alone[recipe], trained(tmp_path))


@pytest.mark.parametrize(
    ("strategy", "ranks", "form"), [("sdp", 2, "consolidated"), ("fsdp", 2, "sharded"), ("hsdp", 4, "sharded")]
)
def test_llamagen_resumes_on_another_number_of_ranks(
    strategy: str, ranks: int, form: str, alone: dict[str, Tensors], tmp_path: Path
) -> None:
    recipe = "grpo-llamagen-tf"
    settings = (*CASES[recipe], f"engine.strategy={strategy}", f"checkpoint.format={form}")
    for steps in (2, 4):
        finish(launch(recipe, tmp_path, f"steps={steps}", *settings, ranks=ranks))
    close(alone[recipe], trained(tmp_path))
