"""Published weights: located offline, read without running code."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from tastemaker.core.registry import ConfigError
from tastemaker.models.pretrained import WeightsSource, find_weights, load_state_dict, load_weights_into

SOURCE = WeightsSource("somebody/model", "model.pt", size="2 GB", license="Apache-2.0", gated=True)


class CodeOnLoad:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, ("echo this must not run",)


def test_local_path_is_returned(tmp_path: Path) -> None:
    assert find_weights(str(tmp_path), SOURCE) == tmp_path


@pytest.mark.parametrize("name", ["somebody/model", "/nowhere/model.pt", "no such name at all"])
def test_missing_weights_name_source_size_and_license(name: str) -> None:
    with pytest.raises(ConfigError) as raised:
        find_weights(name, SOURCE)
    for fragment in (
        "somebody/model/model.pt",
        "2 GB",
        "Apache-2.0",
        "gated",
        "tastemaker download somebody/model/model.pt",
    ):
        assert fragment in str(raised.value)


def test_cached_weights_load_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    snapshot = tmp_path / "models--somebody--model" / "snapshots" / ("a" * 40)
    snapshot.mkdir(parents=True)
    (snapshot / "model.pt").write_bytes(b"x")
    (snapshot.parent.parent / "refs").mkdir()
    (snapshot.parent.parent / "refs" / "main").write_text("a" * 40)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    assert find_weights("somebody/model", SOURCE) == snapshot / "model.pt"


@pytest.mark.parametrize("wrap", [(), ("state_dict",), ("module", "state_dict")])
def test_wrapped_state_dicts_load(wrap: tuple[str, ...], tmp_path: Path) -> None:
    data: object = {"a": torch.ones(2)}
    for name in reversed(wrap):
        data = {name: data, "epoch": 3}
    torch.save(data, tmp_path / "x.pt")
    assert load_state_dict(tmp_path / "x.pt")["a"].equal(torch.ones(2))


def test_sharded_and_unsharded_folders_load(tmp_path: Path) -> None:
    (tmp_path / "single").mkdir()
    (tmp_path / "shards").mkdir()
    save_file({"a": torch.ones(2), "b": torch.zeros(3)}, tmp_path / "single" / "model.safetensors")
    save_file({"a": torch.ones(2)}, tmp_path / "shards" / "model-1.safetensors")
    save_file({"b": torch.zeros(3)}, tmp_path / "shards" / "model-2.safetensors")
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    (tmp_path / "shards" / "model.safetensors.index.json").write_text(json.dumps(index))
    (tmp_path / "pickles").mkdir()
    torch.save({"a": torch.ones(2)}, tmp_path / "pickles" / "pytorch_model-1.bin")
    torch.save({"b": torch.zeros(3)}, tmp_path / "pickles" / "pytorch_model-2.bin")
    index = {"weight_map": {"a": "pytorch_model-1.bin", "b": "pytorch_model-2.bin"}}
    (tmp_path / "pickles" / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    for folder in ("single", "shards", "pickles"):
        state_dict = load_state_dict(tmp_path / folder)
        assert state_dict["a"].equal(torch.ones(2)) and state_dict["b"].equal(torch.zeros(3))


def test_code_in_a_checkpoint_is_not_run(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    torch.save({"a": torch.ones(2), "code": CodeOnLoad()}, tmp_path / "x.pt")
    with pytest.raises(ConfigError, match=r"could run code.*TM519"):
        load_state_dict(tmp_path / "x.pt")
    assert "must not run" not in capfd.readouterr().out


@pytest.mark.parametrize("name", ["x.pt", "x.safetensors"])
def test_truncated_weights_are_refused(name: str, tmp_path: Path) -> None:
    write = torch.save if name == "x.pt" else save_file
    write({"a": torch.ones(4096)}, tmp_path / name)
    content = (tmp_path / name).read_bytes()
    for size in (0, 10, len(content) // 2):
        (tmp_path / name).write_bytes(content[:size])
        with pytest.raises(ConfigError, match=f"{name}.*download"):
            load_state_dict(tmp_path / name)


def test_other_pickles_are_refused(tmp_path: Path) -> None:
    torch.save([1, 2], tmp_path / "x.pt")
    with pytest.raises(ConfigError, match=r"x\.pt.* a list.*TM508"):
        load_state_dict(tmp_path / "x.pt")
    with pytest.raises(ConfigError, match=r"holds no weights.*TM507"):
        load_state_dict(tmp_path)


def test_load_weights_into_is_strict() -> None:
    net = nn.Linear(2, 3)
    load_weights_into(net, {"weight": torch.ones(3, 2)}, "x", optional=("bias",))
    assert net.weight.eq(1).all()
    incomplete, misshapen = {"weight": torch.ones(3, 2)}, {"weight": torch.ones(1, 2), "bias": torch.ones(3)}
    for tensors, key in ((incomplete, "bias"), (misshapen, "weight")):
        with pytest.raises(ConfigError, match=f"'x'.*'{key}'"):
            load_weights_into(net, tensors, "x")
    with pytest.raises(ConfigError, match=r"'more'.*TM509"):
        load_weights_into(net, {"weight": torch.ones(3, 2), "bias": torch.ones(3), "more": torch.ones(1)}, "x")
