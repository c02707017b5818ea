"""A Show-o trained to paint, handed to others in the layout it is published in."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tastemaker.cli import EXIT_USAGE, main
from tastemaker.config.load import load
from tastemaker.core.types import Placement
from tastemaker.models.showo.model import Showo


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(list(arguments))
    return int(ended.value.code or 0)


def test_a_painter_is_exported_as_published_and_paints_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    small = ["--tiny", "--device", "cpu"]
    assert run("train", "dpo-showo", *small, "steps=1", "batch.prompts=2", "sample.every=0", "name=mine") == 0
    assert run("export", "runs/mine", "--out", "told") == 0
    config = json.loads(Path("told/config.json").read_text())
    assert config["_class_name"] == "Showo" and config["llm_model_path"] == "microsoft/phi-1_5"
    assert config["mask_token_id"] == config["vocab_size"] - 1 and config["num_vq_tokens"] == 16
    tensors = load_file("told/pytorch_model.safetensors")
    assert tensors["showo.lm_head.weight"].shape[0] == config["vocab_size"]
    painter = load("dpo-showo").model.tiny()
    assert isinstance(painter, Showo)
    read, fresh = (replace(painter, weights=weights).load(Placement()).net.state_dict() for weights in ("told", None))
    trained = load_file(next(Path("runs/mine/checkpoints").glob("*/weights.safetensors")))
    assert any(not torch.equal(read[key], fresh[key]) for key in trained)
    assert all(torch.allclose(read[key], x, atol=1e-2) for key, x in trained.items())  # in half precision
    capsys.readouterr()
    assert run("export", "runs/mine", "--out", "told") == EXIT_USAGE
    assert "must be a new folder" in capsys.readouterr().err
