"""Weight files with their configuration, in folders, runs and the package."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
import torch

from tastemaker.core.registry import ConfigError
from tastemaker.models import weight_files


def test_written_weights_are_read_as_float32_with_config(tmp_path: Path) -> None:
    tensors = {"a": torch.tensor([0.1, 2.0]), "b": torch.tensor([3, 4])}
    weight_files.write_weights(tmp_path / "x.safetensors", tensors, {"model": {"type": "dit"}})
    loaded, config = weight_files.read_weights(tmp_path / "x.safetensors")
    assert config == {"model": {"type": "dit"}}
    assert loaded["a"].dtype == torch.float32 and torch.allclose(loaded["a"], tensors["a"], atol=1e-3)
    assert loaded["b"].equal(tensors["b"])
    assert [path.name for path in tmp_path.iterdir()] == ["x.safetensors"]


def test_weights_have_the_permissions_of_new_files(tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        weight_files.write_weights(tmp_path / "x.safetensors", {"a": torch.zeros(1)}, {})
    finally:
        os.umask(before)
    assert (tmp_path / "x.safetensors").stat().st_mode & 0o777 == 0o644


def test_float32_weights_are_exact(tmp_path: Path) -> None:
    weight_files.write_weights(tmp_path / "x.safetensors", {"a": torch.tensor([0.1])}, {}, torch.float32)
    assert weight_files.read_weights(str(tmp_path / "x.safetensors"))[0]["a"].equal(torch.tensor([0.1]))


@pytest.mark.parametrize("name", ["nothing", "playground/nothing", "missing.safetensors", "../x"])
def test_missing_weights_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=f"'{re.escape(name)}'"):
        weight_files.read_weights(name)


def test_file_of_another_format_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.safetensors").write_bytes(b"no tensors")
    with pytest.raises(ConfigError, match=r"x\.safetensors.*safetensors file.*TM547"):
        weight_files.read_weights(tmp_path / "x.safetensors")


def test_run_without_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no checkpoint yet.*TM548"):
        weight_files.read_weights(tmp_path)
