"""A Show-o trained to paint, handed to others in the layout it is published in."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tastemaker.cli import MISTAKE, main


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
    assert run("generate", "dpo-showo", *small, "-p", "a cup", "model.weights=told", "--out", "pictures") == 0
    capsys.readouterr()
    assert run("export", "runs/mine", "--out", "told") == MISTAKE
    assert "must be a new folder" in capsys.readouterr().err
