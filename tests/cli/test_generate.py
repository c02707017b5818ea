"""Generating in bulk: any number of ranks, gone on with, with adapters as strong as asked for."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from cli_runner import run_cli

from tastemaker.cli import EXIT_USAGE
from tastemaker.config.load import load
from tastemaker.core.registry import ConfigError
from tastemaker.core.types import PromptBatch
from tastemaker.data.image_io import read_image, save_image
from tastemaker.export.lora import DIFFUSERS_LORA_FILE
from tastemaker.search.generation import choose_prompts, find_lora, slugify

ROOT = Path(__file__).parent.parent.parent
QUICK = ["steps=2", "sample.every=0", "guard.every=0", "batch.prompts=4", "objective.group_size=4"]
LORA = ["tuning={type: lora, rank: 4}", "optim.lr=0.3"]


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")


def rows(folder: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(folder, "metadata.jsonl").read_text().splitlines()]


def pixels(folder: str) -> torch.Tensor:
    return torch.stack([read_image(Path(folder, row["file"])) for row in rows(folder)])


def on_ranks(count: int, *arguments: str) -> None:
    """The same command in as many processes, as torchrun would start them."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(count)}
    shared |= {**os.environ, **shared, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    started = [
        subprocess.Popen(
            [sys.executable, "-m", "tastemaker", *arguments],
            env={**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stderr=subprocess.PIPE, text=True,
        )
        for rank in range(count)
    ]  # fmt: skip
    told = [process.communicate(timeout=120)[1] for process in started]
    for process, words in zip(started, told, strict=True):
        assert process.returncode == 0, words


@pytest.mark.slow
@pytest.mark.ranks
def test_two_ranks_make_the_pictures_of_one(tmp_path: Path) -> None:
    Path("prompts.txt").write_text("\n".join(f"a {name}" for name in ("red", "blue", "green", "white", "red")))
    asked = ["generate", "grpo-toy-flow", "--prompts", "prompts.txt", "--count", "3", "--device", "cpu"]
    assert run_cli(*asked, "--out", "one") == 0
    on_ranks(2, *asked, "batch.rollout_batch_size=4", "--out", "two")  # four shares of four, four, four and three
    assert len(rows("one")) == 15
    assert [row["file"] for row in rows("two")] == sorted(row["file"] for row in rows("one"))
    assert (pixels("one") - pixels("two")).abs().max() <= 1 / 255 + 1e-6  # a batch of another size rounds otherwise
    assert sorted(path.name for path in Path("two").glob("metadata*")) == ["metadata.jsonl"]
    assert Path("two/sheet.png").is_file()


def test_what_was_trained_makes_pictures_though_its_data_is_gone() -> None:
    file = Path("prompts.txt")
    file.write_text("a red\na blue")
    assert run_cli("train", "grpo-toy-flow", "steps=1", "data={type: prompt_file, path: prompts.txt}") == 0
    file.unlink()
    assert run_cli("generate", "runs/grpo-toy-flow", "-p", "a red", "--out", "made") == 0
    assert len(rows("made")) == 1


def test_pictures_that_are_there_stay_and_the_rest_is_made(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["generate", "grpo-toy-flow", "-p", "a red", "-p", "a blue", "--count", "2", "--out", "made"]
    assert run_cli(*asked) == 0
    files = [Path("made", row["file"]) for row in rows("made")]
    before = [path.read_bytes() for path in files]
    files[1].unlink()
    files[2].touch()
    stamp = files[0].stat().st_mtime_ns
    capsys.readouterr()
    assert run_cli(*asked) == 0
    assert "4 images in made (3 existed before)" in capsys.readouterr().err
    assert [path.read_bytes() for path in files] == before and files[0].stat().st_mtime_ns == stamp
    assert run_cli(*asked, "--seed", "1") == 0  # other pictures, though of the same names
    assert "existed before" not in capsys.readouterr().err
    assert [path.read_bytes() for path in files] != before


def test_what_an_interrupted_rank_wrote_down_counts() -> None:
    asked = ["generate", "grpo-toy-flow", "-p", "a red", "--count", "2", "--out", "made"]
    assert run_cli(*asked) == 0
    lines = Path("made/metadata.jsonl").read_text().splitlines()
    Path("made/metadata.jsonl").unlink()
    Path("made/metadata.jsonl.1").write_text(lines[0] + "\n" + lines[1][:20])
    stamp = Path("made", json.loads(lines[0])["file"]).stat().st_mtime_ns
    assert run_cli(*asked) == 0
    assert len(rows("made")) == 2 and Path("made", rows("made")[0]["file"]).stat().st_mtime_ns == stamp
    assert not Path("made/metadata.jsonl.1").exists()


def test_adapters_count_as_much_as_asked_for() -> None:
    assert run_cli("train", "grpo-toy-flow", *QUICK, *LORA) == 0
    asked = ["-p", "a red", "--count", "4"]
    assert run_cli("generate", "runs/grpo-toy-flow", *asked, "--out", "whole") == 0
    assert run_cli("generate", "runs/grpo-toy-flow", *asked, "--lora-scale", "0", "--out", "none") == 0
    assert run_cli("generate", "runs/grpo-toy-flow", *asked, "--lora-scale", "0.5", "--out", "half") == 0
    assert run_cli("generate", "grpo-toy-flow", *asked, "--out", "base") == 0
    assert pixels("none").equal(pixels("base"))
    assert not pixels("whole").equal(pixels("base"))
    assert not pixels("half").equal(pixels("base")) and not pixels("half").equal(pixels("whole"))


def test_a_lora_run_exported_to_one_file_is_what_the_run_paints() -> None:
    small = [
        "model={autoencoder: null, width: 32, depth: 1, heads: 2, patch_size: 4}",
        "engine.precision=fp32",
        "data.device=cpu",
    ]
    quick = [
        *small,
        "engine.compile=false",
        "steps=1",
        "sample.every=0",
        "batch.prompts=8",
        "ema_decay=0",
        "sample.weights=live",
    ]
    assert run_cli("train", "playground-flow16", *quick, *LORA, "name=run", "--device", "cpu") == 0
    assert run_cli("export", "runs/run", "--out", "flow.safetensors", "--bits", "32") == 0
    asked = ["-p", "a photo of a red car", "--device", "cpu"]
    assert run_cli("generate", "runs/run", *asked, "--out", "one") == 0
    settings = [*quick, "model.weights=flow.safetensors"]
    assert run_cli("generate", "playground-flow16", *settings, *asked, "--out", "two") == 0
    assert (pixels("one") - pixels("two")).abs().max() <= 1 / 255 + 1e-6


def test_mistakes_are_sentences(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_cli("generate", "grpo-toy-flow", "-p", "a red", "--lora-scale", "0.5") == EXIT_USAGE
    assert "these weights have no LoRA" in " ".join(capsys.readouterr().err.split())
    assert run_cli("generate", "grpo-toy-flow", "-p", "a red", "--lora", "gone.pt") == EXIT_USAGE
    assert "--lora: there is no file gone.pt; pass a LoRA file" in " ".join(capsys.readouterr().err.split())
    Path("a.png").write_bytes(b"")
    assert run_cli("generate", "grpo-toy-flow", "-p", "a red", "--lora", "a.png") == EXIT_USAGE
    assert "a.png ends in '.png'; expected a directory, .safetensors" in " ".join(capsys.readouterr().err.split())
    assert run_cli("train", "grpo-toy-flow", *QUICK) == 0
    capsys.readouterr()
    assert run_cli("generate", "runs/grpo-toy-flow", "--lora", "x.safetensors") == EXIT_USAGE
    assert "is a run, which has weights of its own" in " ".join(capsys.readouterr().err.split())


def test_adapters_alone_in_a_folder_are_found_there(tmp_path: Path) -> None:
    for name in ("README.md", "recipe.yaml", DIFFUSERS_LORA_FILE):
        (tmp_path / name).write_bytes(b"")
    assert find_lora(tmp_path, None).path == tmp_path / DIFFUSERS_LORA_FILE
    (tmp_path / "others.pt").write_bytes(b"")
    with pytest.raises(ConfigError, match=f"holds others.pt, {DIFFUSERS_LORA_FILE}; expected one LoRA file"):
        find_lora(tmp_path, None)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match="empty holds no LoRA file"):
        find_lora(tmp_path / "empty", None)


def test_of_data_that_say_nothing_as_many_are_made_as_asked_for(tmp_path: Path) -> None:
    for i in range(3):
        save_image(torch.rand(1, 3, 8, 8), tmp_path / "pictures" / f"{i}.png")
    silent = load("dit-folder", [f"data={{type: image_collection, path: {tmp_path / 'pictures'}, image_size: 64}}"])
    assert choose_prompts((), None, silent) == PromptBatch(("",), ({},))
    assert len(choose_prompts((), None, load("grpo-toy-flow"))) == 8
    (tmp_path / "pictures").rename(tmp_path / "others")
    with pytest.raises(ConfigError, match=r"there is no such folder; .*; or pass prompts with -p"):
        choose_prompts((), None, silent)
    assert choose_prompts(("",), None, silent) == PromptBatch(("",), ({},))


@pytest.mark.parametrize(
    ("prompt", "name"), [("A red cat, twice!", "a-red-cat-twice"), ("一只红色的猫!", "一只红色的猫"), ("...", "empty")]
)
def test_files_are_named_by_their_prompts_in_any_script(prompt: str, name: str) -> None:
    assert slugify(prompt) == name


@pytest.mark.slow
def test_ranks_that_need_one_another_are_not_left_waiting_by_a_search_that_ends_early(tmp_path: Path) -> None:
    asked = ("generate", "grpo-toy-flow", "-p", "a", "--search", "refine", "engine.strategy=fsdp")
    with pytest.raises(AssertionError, match=r"would deadlock; set engine\.strategy=replicated"):
        on_ranks(2, *asked, "--out", str(tmp_path / "two"))
