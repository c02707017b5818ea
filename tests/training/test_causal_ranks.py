"""Published token generators and what learns of pictures train on several ranks as on one, and go on after a stop."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from launch_ranks import finish, launch
from test_run_ranks import close, read

pytestmark = [pytest.mark.slow, pytest.mark.ranks, pytest.mark.xdist_group("ranks")]
SMALL = (
    *("model.size=tiny", "model.weights=null", "model.codec=null", "model.pixels=32", "model.downsample=8"),
    *("model.codes=64", "data.size=32", "engine.precision=fp32", "engine.reduce=fp32", "guard.every=0"),
)
CASES = {
    "forced-grpo-toy-causal": ("guard.every=0",),
    "cca-toy-causal": ("guard.every=0",),
    "grpo-llamagen-tf": (*SMALL, "batch.updates=1", "optim.lr=1e-3"),
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


@pytest.mark.parametrize("recipe", ["forced-grpo-toy-causal", "cca-toy-causal"])
def test_learning_of_pictures_on_two_ranks_is_learning_on_one(
    recipe: str, alone: dict[str, Tensors], tmp_path: Path
) -> None:
    finish(launch(recipe, tmp_path, "steps=4", "engine.strategy=fsdp", *CASES[recipe], ranks=2))
    close(alone[recipe], trained(tmp_path))


@pytest.mark.parametrize(
    ("strategy", "ranks", "form"), [("sdp", 2, "consolidated"), ("fsdp", 2, "sharded"), ("hsdp", 4, "sharded")]
)
def test_a_small_llamagen_goes_on_where_its_ranks_stopped(
    strategy: str, ranks: int, form: str, alone: dict[str, Tensors], tmp_path: Path
) -> None:
    recipe = "grpo-llamagen-tf"
    settings = (*CASES[recipe], f"engine.strategy={strategy}", f"checkpoint.form={form}")
    for steps in (2, 4):
        finish(launch(recipe, tmp_path, f"steps={steps}", *settings, ranks=ranks))
    close(alone[recipe], trained(tmp_path))
