"""Export of Show-o in its published layout."""

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
from tastemaker.models.showo.model import ShowoSpec


def run_command(*arguments: str) -> int:
    with pytest.raises(SystemExit) as exit_info:
        main(list(arguments))
    return int(exit_info.value.code or 0)


def test_showo_is_exported_in_the_published_layout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    options = ["--tiny", "--device", "cpu"]
    assert run_command("train", "dpo-showo", *options, "steps=1", "batch.prompts=2", "sample.every=0", "name=mine") == 0
    assert run_command("export", "runs/mine", "--out", "published") == 0
    config = json.loads(Path("published/config.json").read_text())
    assert config["_class_name"] == "Showo" and config["llm_model_path"] == "microsoft/phi-1_5"
    assert config["mask_token_id"] == config["vocab_size"] - 1 and config["num_vq_tokens"] == 16
    tensors = load_file("published/pytorch_model.safetensors")
    assert tensors["showo.lm_head.weight"].shape[0] == config["vocab_size"]
    spec = load("dpo-showo").model.tiny()
    assert isinstance(spec, ShowoSpec)
    exported, untrained = (
        replace(spec, weights=weights).load(Placement()).net.state_dict() for weights in ("published", None)
    )
    trained = load_file(next(Path("runs/mine/checkpoints").glob("*/weights.safetensors")))
    assert any(not torch.equal(exported[key], untrained[key]) for key in trained)
    assert all(torch.allclose(exported[key], x, atol=1e-2) for key, x in trained.items())  # in half precision
    capsys.readouterr()
    assert run_command("export", "runs/mine", "--out", "published") == EXIT_USAGE
    assert "'published'" in (error := capsys.readouterr().err) and "TM690" in error
