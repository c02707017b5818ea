"""Loading in parts: each rank reads its rows of a published network; other folders are loaded as a whole."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from diffusers import FluxTransformer2DModel
from launch_ranks import failures, report
from safetensors.torch import load_file, save_file
from sharded_loading_ranks import CHECKS
from tiny_pipelines import make_flux_pipeline

from tastemaker.core.registry import ConfigError
from tastemaker.core.types import Placement
from tastemaker.models.deferred_loading import INDEX_FILE, WEIGHTS_FILE
from tastemaker.models.flux import FluxSpec

META = Placement(trainable_dtype=torch.float32, trainable_device=torch.device("meta"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small FLUX in the published layout: several files of the transformer, with their index."""
    pipeline, folder = make_flux_pipeline(distilled=True), tmp_path_factory.mktemp("ranks") / "flux"
    pipeline.save_pretrained(folder)
    (folder / "transformer" / WEIGHTS_FILE).unlink()
    pipeline.transformer.save_pretrained(folder / "transformer", max_shard_size="100KB")
    assert (folder / "transformer" / INDEX_FILE).is_file()
    return folder


@pytest.mark.ranks
def test_each_rank_reads_its_part(folder: Path) -> None:
    assert failures(report("sharded_loading_ranks.py", folder.parent, 2), CHECKS) == []


def test_a_folder_that_needs_a_conversion_is_loaded_as_a_whole(folder: Path, tmp_path: Path) -> None:
    expected = FluxTransformer2DModel.from_pretrained(folder / "transformer")
    for component in folder.iterdir():
        if component.name != "transformer":
            (tmp_path / component.name).symlink_to(component)
    target = tmp_path / "transformer"
    expected.save_pretrained(target, safe_serialization=False)
    pickled = FluxSpec(str(tmp_path)).load(META).net
    expected.save_pretrained(target, variant="fp16")
    for file in target.glob("*.bin"):
        file.unlink()
    variant = FluxSpec(str(tmp_path)).load(META).net
    save_file(expected.state_dict(), tmp_path / "other.safetensors")
    single_file = FluxSpec(str(folder), transformer=str(tmp_path / "other.safetensors")).load(META).net
    for net in (pickled, variant, single_file):
        assert not hasattr(net, "deferred_tensors")
        assert all(torch.equal(p, q) for p, q in zip(net.parameters(), expected.parameters(), strict=True))


def test_damaged_folders_are_refused_as_ever(folder: Path, tmp_path: Path) -> None:
    target = tmp_path / "transformer"
    target.mkdir()
    (target / "config.json").write_text((folder / "transformer" / "config.json").read_text())
    tensors = {key: x for file in (folder / "transformer").glob("*.safetensors") for key, x in load_file(file).items()}
    del tensors["x_embedder.weight"]
    save_file(tensors, target / WEIGHTS_FILE)
    with pytest.raises(ConfigError, match=r"x_embedder\.weight.*TM502"):
        FluxSpec(str(tmp_path)).load(META)
    (target / WEIGHTS_FILE).write_bytes((target / WEIGHTS_FILE).read_bytes()[:-8])
    with pytest.raises(ConfigError, match=r"transformer.*TM501"):
        FluxSpec(str(tmp_path)).load(META)
    (target / INDEX_FILE).write_text(
        json.dumps({"metadata": {}, "weight_map": {"x_embedder.weight": "missing.safetensors"}})
    )
    with pytest.raises(ConfigError, match=r"transformer.*TM501"):
        FluxSpec(str(tmp_path)).load(META)
