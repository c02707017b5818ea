"""`tastemaker generate`: several ranks, resumption, LoRA scales and file names."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from cli_runner import run_cli
from free_ports import reserve_port

from tastemaker.cli import EXIT_USAGE
from tastemaker.config.build import build
from tastemaker.config.load import list_recipes, load
from tastemaker.core.registry import ConfigError
from tastemaker.core.types import Placement, PromptBatch
from tastemaker.data.image_io import read_image, save_image
from tastemaker.evaluation.geneval import load_geneval_scorer, parse_detector
from tastemaker.export.lora import DIFFUSERS_LORA_FILE
from tastemaker.models.weight_files import is_shipped
from tastemaker.search.generation import PLAYGROUND_MODELS, choose_prompts, find_lora, resolve_source
from tastemaker.training.run_directory import write_run_config

ROOT = Path(__file__).parent.parent.parent
QUICK = ["steps=2", "sample.every=0", "guard.every=0", "batch.prompts=4", "objective.group_size=4"]
LORA = ["tuning={type: lora, rank: 4}", "optim.lr=0.3"]


@pytest.fixture(autouse=True)
def working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")


def read_metadata(folder: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(folder, "metadata.jsonl").read_text().splitlines()]


def read_pixels(folder: str) -> torch.Tensor:
    return torch.stack([read_image(Path(folder, row["file"])) for row in read_metadata(folder)])


def run_on_ranks(count: int, *arguments: str) -> None:
    """Run a command in `count` processes with torchrun's environment variables."""
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(reserve_port()), "WORLD_SIZE": str(count)}
    shared |= {**os.environ, **shared, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "tastemaker", *arguments],
            env={**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stderr=subprocess.PIPE, text=True,
        )
        for rank in range(count)
    ]  # fmt: skip
    outputs = [process.communicate(timeout=300)[1] for process in processes]
    for process, output in zip(processes, outputs, strict=True):
        assert process.returncode == 0, output


@pytest.mark.slow
@pytest.mark.ranks
def test_two_ranks_generate_the_images_of_one(tmp_path: Path) -> None:
    Path("prompts.txt").write_text("\n".join(f"a {name}" for name in ("red", "blue", "green", "white", "red")))
    arguments = ["generate", "grpo-toy-flow", "--prompts", "prompts.txt", "--count", "3", "--device", "cpu"]
    assert run_cli(*arguments, "--out", "one") == 0
    run_on_ranks(2, *arguments, "batch.rollout_batch_size=4", "--out", "two")  # batches of four, four, four and three
    assert len(read_metadata("one")) == 15
    assert [row["file"] for row in read_metadata("two")] == sorted(row["file"] for row in read_metadata("one"))
    assert (read_pixels("one") - read_pixels("two")).abs().max() <= 1 / 255 + 1e-6  # rounding depends on the batch size
    assert sorted(path.name for path in Path("two").glob("metadata*")) == ["metadata.jsonl"]
    assert Path("two/sheet.png").is_file()


def test_generation_works_after_the_training_data_is_deleted() -> None:
    file = Path("prompts.txt")
    file.write_text("a red\na blue")
    assert run_cli("train", "grpo-toy-flow", "steps=1", "data={type: prompt_file, path: prompts.txt}") == 0
    file.unlink()
    assert run_cli("generate", "runs/grpo-toy-flow", "-p", "a red", "--out", "made") == 0
    assert len(read_metadata("made")) == 1


def test_existing_images_are_kept_and_missing_ones_generated(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["generate", "grpo-toy-flow", "-p", "a red", "-p", "a blue", "--count", "2", "--out", "made"]
    assert run_cli(*arguments) == 0
    files = [Path("made", row["file"]) for row in read_metadata("made")]
    before = [path.read_bytes() for path in files]
    files[1].unlink()
    files[2].touch()
    mtime = files[0].stat().st_mtime_ns
    capsys.readouterr()
    assert run_cli(*arguments) == 0
    assert "4 images in made (3 existed before)" in capsys.readouterr().err
    assert [path.read_bytes() for path in files] == before and files[0].stat().st_mtime_ns == mtime
    assert run_cli(*arguments, "--seed", "1") == 0  # other images with the same file names
    assert "existed before" not in capsys.readouterr().err
    assert [path.read_bytes() for path in files] != before


@pytest.mark.parametrize("search", ["single", "best_of_n", "parm", "prm", "fk_steering", "refine"])
def test_step_images_are_written_on_request(search: str) -> None:
    settings = "{type: refine, search: {type: best_of_n, n: 2}, max_rounds: 2}" if search == "refine" else search
    arguments = ["generate", "grpo-toy-masked", "--tiny", "-p", "red", "-p", "blue", "--search", settings]
    arguments += ["--num-candidates", "2", "process.num_steps=3", "--device", "cpu"]
    assert run_cli(*arguments, "--out", "plain") == run_cli(*arguments, "--out", "steps", "--save-steps") == 0
    assert torch.equal(read_pixels("plain"), read_pixels("steps")) and not Path("plain/process").exists()
    names = {path.relative_to("steps/process").as_posix() for path in Path("steps/process").rglob("*.png")}
    candidates = range(1 if search == "single" else 2)
    every = {f"{sample:05d}/{k:05d}_step{step}.png" for sample in (0, 1) for k in candidates for step in (1, 2, 3)}
    if search == "parm":  # some candidates are dropped on the way
        assert {name for name in every if "step1" in name} <= names <= every
    else:
        assert every <= names and all("round" in name for name in names - every)
    if search == "single":  # the preview of the last step is the sample
        assert torch.equal(read_image(Path("steps/process/00001/00000_step3.png")), read_pixels("steps")[1])


def test_metadata_of_an_interrupted_rank_is_used() -> None:
    arguments = ["generate", "grpo-toy-flow", "-p", "a red", "--count", "2", "--out", "made"]
    assert run_cli(*arguments) == 0
    lines = Path("made/metadata.jsonl").read_text().splitlines()
    Path("made/metadata.jsonl").unlink()
    Path("made/metadata.jsonl.1").write_text(lines[0] + "\n" + lines[1][:20])
    mtime = Path("made", json.loads(lines[0])["file"]).stat().st_mtime_ns
    assert run_cli(*arguments) == 0
    assert (
        len(read_metadata("made")) == 2 and Path("made", read_metadata("made")[0]["file"]).stat().st_mtime_ns == mtime
    )
    assert not Path("made/metadata.jsonl.1").exists()


def test_lora_scale_sets_the_strength_of_the_adapter() -> None:
    assert run_cli("train", "grpo-toy-flow", *QUICK, *LORA) == 0
    arguments = ["-p", "a red", "--count", "4"]
    assert run_cli("generate", "runs/grpo-toy-flow", *arguments, "--out", "whole") == 0
    assert run_cli("generate", "runs/grpo-toy-flow", *arguments, "--lora-scale", "0", "--out", "none") == 0
    assert run_cli("generate", "runs/grpo-toy-flow", *arguments, "--lora-scale", "0.5", "--out", "half") == 0
    assert run_cli("generate", "grpo-toy-flow", "name=base", *arguments, "--out", "base") == 0
    assert read_pixels("none").equal(read_pixels("base"))
    assert not read_pixels("whole").equal(read_pixels("base"))
    assert not read_pixels("half").equal(read_pixels("base")) and not read_pixels("half").equal(read_pixels("whole"))


def test_exported_lora_run_generates_the_same_images() -> None:
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
    arguments = ["-p", "a photo of a red car", "--device", "cpu"]
    assert run_cli("generate", "runs/run", *arguments, "--out", "one") == 0
    settings = [*quick, "model.weights=flow.safetensors"]
    assert run_cli("generate", "playground-flow16", *settings, *arguments, "--out", "two") == 0
    assert (read_pixels("one") - read_pixels("two")).abs().max() <= 1 / 255 + 1e-6


def test_playground_recipes_generate_from_the_shipped_weights() -> None:
    """`generate playground-flow` samples the trained model; overrides of the model choose other weights."""
    for name, weights in (("playground", "flow16"), *((f"playground-{x}", x) for x in ("flow", "masked", "video"))):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            config, checkpoint = resolve_source(name, [])
        assert config.model.weights == f"playground/{weights}" and checkpoint is None
    assert {*PLAYGROUND_MODELS} < {*list_recipes()} and all(is_shipped(name) for name in PLAYGROUND_MODELS.values())
    assert load("playground-flow").model.weights is None  # training starts from random weights
    assert resolve_source("playground", [], tiny=True)[0].model.weights is None
    with pytest.warns(UserWarning, match="random weights"):
        assert resolve_source("playground-flow", ["model.weights=null"])[0].model.weights is None


@pytest.mark.parametrize(
    ("recipe", "words"), [("dit-folder", "model.weights is not set"), ("grpo-toy-flow", "toy_flow")]
)
def test_random_weights_warn(recipe: str, words: str) -> None:
    with pytest.warns(UserWarning, match=f"{words}.*random weights"):
        resolve_source(recipe, [])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        resolve_source(recipe, [], tiny=True)


def test_generate_playground_writes_images_of_the_trained_model(capfd: pytest.CaptureFixture[str]) -> None:
    prompt = ["-p", "a photo of a red car", "process.num_steps=2", "--device", "cpu"]
    assert run_cli("generate", "playground-flow", *prompt, "--out", "made") == 0
    assert read_pixels("made").shape == (1, 1, 3, 64, 64) and "random weights" not in capfd.readouterr().err


def test_invalid_lora_options_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_cli("generate", "grpo-toy-flow", "-p", "a red", "--lora-scale", "0.5") == EXIT_USAGE
    assert "--lora-scale" in " ".join(capsys.readouterr().err.split())
    assert run_cli("generate", "grpo-toy-flow", "-p", "a red", "--lora", "gone.pt") == EXIT_USAGE
    assert "--lora: " in " ".join(capsys.readouterr().err.split())
    Path("a.png").write_bytes(b"")
    assert run_cli("generate", "grpo-toy-flow", "-p", "a red", "--lora", "a.png") == EXIT_USAGE
    assert "'.png'" in " ".join(capsys.readouterr().err.split())
    assert run_cli("train", "grpo-toy-flow", *QUICK) == 0
    capsys.readouterr()
    assert run_cli("generate", "runs/grpo-toy-flow", "--lora", "x.safetensors") == EXIT_USAGE
    assert "runs/grpo-toy-flow is a run" in " ".join(capsys.readouterr().err.split())


def test_lora_is_located_in_a_directory(tmp_path: Path) -> None:
    for name in ("README.md", "recipe.yaml", DIFFUSERS_LORA_FILE):
        (tmp_path / name).write_bytes(b"")
    assert find_lora(tmp_path, None).path == tmp_path / DIFFUSERS_LORA_FILE
    (tmp_path / "others.pt").write_bytes(b"")
    with pytest.raises(ConfigError, match=f"others.pt, {DIFFUSERS_LORA_FILE}"):
        find_lora(tmp_path, None)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match=r"/empty .*TM685"):
        find_lora(tmp_path / "empty", None)


def test_data_with_no_captions_gives_an_empty_prompt(tmp_path: Path) -> None:
    for i in range(3):
        save_image(torch.rand(1, 3, 8, 8), tmp_path / "images" / f"{i}.png")
    uncaptioned = load("dit-folder", [f"data={{type: image_collection, path: {tmp_path / 'images'}, image_size: 64}}"])
    assert choose_prompts((), None, uncaptioned) == PromptBatch(("",), ({},))
    assert len(choose_prompts((), None, load("grpo-toy-flow"))) == 8
    (tmp_path / "images").rename(tmp_path / "others")
    with pytest.raises(ConfigError, match=r"TM179"):
        choose_prompts((), None, uncaptioned)
    assert choose_prompts(("",), None, uncaptioned) == PromptBatch(("",), ({},))


@pytest.mark.slow
def test_search_that_would_deadlock_sharded_ranks_is_refused(tmp_path: Path) -> None:
    arguments = ("generate", "grpo-toy-flow", "-p", "a", "--search", "refine", "engine.strategy=fsdp")
    with pytest.raises(AssertionError, match=r"engine\.strategy=replicated"):
        run_on_ranks(2, *arguments, "--out", str(tmp_path / "two"))


def test_tiny_evaluation_warns_about_ignored_weights(tmp_path: Path) -> None:
    """`--tiny` ignores overrides, the weights of a run and those of a detector, and says so."""
    sizes = ["model.width=64", "model.depth=1", "model.heads=2", "model.autoencoder=null", "model.latent_channels=12"]
    config = load("dit-folder", [*sizes, "engine={device: cpu, compile: false}", f"output_dir={tmp_path}", "name=run"])
    build(config).save(1)
    write_run_config(config, config.directory)
    with pytest.warns(UserWarning, match=r"model\.width=64.*ignored.*TM020"):
        resolve_source("dit-folder", sizes, tiny=True)
    assert resolve_source(str(config.directory), [])[1] is not None
    with pytest.warns(UserWarning, match=r"step-000001 are ignored.*TM844"):
        assert resolve_source(str(config.directory), [], tiny=True)[1] is None
    with pytest.warns(UserWarning, match=r"other-detector is ignored.*TM845"):
        load_geneval_scorer(parse_detector("other-detector", self_test=False), Placement(), tiny=True)


def test_recipe_with_weights_stands_for_the_model_before_training(tmp_path: Path) -> None:
    """A recipe's name keeps the weights it names, with a warning about its run; a file of yours stands for its run."""
    recipe, own = "grpo-playground-flow", tmp_path / "own.yaml"
    own.write_text(f"extends: {recipe}\noutput_dir: {tmp_path}\nname: run")
    config, step = load(own), tmp_path / "run/checkpoints/step-000001"
    assert resolve_source(str(own), [])[1] is None
    step.mkdir(parents=True)
    write_run_config(config, config.directory)
    with pytest.warns(UserWarning, match=r"model\.weights=playground/flow.*TM847"):
        assert resolve_source(recipe, [f"output_dir={tmp_path}", "name=run"])[1] is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert resolve_source(str(own), ["process.num_steps=4"])[1] == step
        assert resolve_source(str(own), ["model.weights=playground/flow16"])[1] is None


@pytest.mark.slow
def test_sources_are_given_by_option_or_by_the_file_of_prompts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, value in (("dark.png", 0.1), ("light.png", 0.9)):
        save_image(torch.full((1, 3, 64, 64), value), Path(name))
    command = ("generate", "playground-edit", "--tiny", "--device", "cpu", "-p", "remove the dog", "--out", "out")
    assert run_cli(*command, "--image", "dark.png") == 0
    first = read_image(next(Path("out").glob("00000-*.png")))
    (record,) = [json.loads(line) for line in Path("out/metadata.jsonl").read_text().splitlines()]
    assert record["image"] == str(Path("dark.png").resolve())
    sheet = read_image(Path("out/sheet.png"))  # the source is to the left of the sample, both twice as large
    assert sheet.shape[-1] == 2 * 2 * 64 + 4 and torch.allclose(sheet[0, :, 2:100, 2:100], torch.tensor(0.1), atol=0.01)
    assert run_cli(*command, "--image", "light.png") == 0  # another source is another sample
    assert not read_image(next(Path("out").glob("00000-*.png"))).equal(first)
    rows = [{"prompt": "remove the dog", "image": "dark.png"}, {"prompt": "remove the dog", "image": "light.png"}]
    Path("edits.jsonl").write_text("\n".join(map(json.dumps, rows)))
    assert run_cli(*command[:5], "--prompts", "edits.jsonl", "--out", "file") == 0
    assert read_image(next(Path("file").glob("00000-*.png"))).equal(first)
    assert run_cli("score", "file", "--reward", "source_similarity") == 0
    assert run_cli(*command, "--image", "none.png") == EXIT_USAGE and "TM234" in capsys.readouterr().err
