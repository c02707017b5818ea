"""RAM, DGPO and CRD on two ranks equal one, snapshots included: statistics of all ranks, whole groups on each."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from launch_ranks import finish, launch
from test_run_ranks import assert_close, read_tensors

pytestmark = [pytest.mark.slow, pytest.mark.ranks, pytest.mark.xdist_group("ranks")]
SETTINGS = ("steps=3", "batch.prompts=4", "optim.lr=1e-4")
SNAPSHOTS = {
    "ram-toy-flow": ("old", "reference"),
    "dgpo-toy-flow": ("old", "reference"),
    "crd-toy-flow": ("old", "sampling", "reference"),
    "leap-toy-flow": (),
}


def final_tensors(directory: Path, recipe: str) -> dict[str, torch.Tensor]:
    checkpoint = directory / "checkpoints/step-000003"
    names = ("weights", *(f"snapshots/{name}" for name in SNAPSHOTS[recipe]))
    return {f"{name}/{key}": x for name in names for key, x in read_tensors(checkpoint, name).items()}


@pytest.mark.parametrize("recipe", SNAPSHOTS)
def test_two_ranks_equal_one(recipe: str, tmp_path: Path) -> None:
    for ranks in (1, 2):
        finish(launch(recipe, tmp_path / str(ranks), *SETTINGS, ranks=ranks))
    assert_close(final_tensors(tmp_path / "1", recipe), final_tensors(tmp_path / "2", recipe))
