"""`tastemaker check` reads the data, looks for files and says how many prompts a run sees."""

from __future__ import annotations

from pathlib import Path

import pytest
from cli_runner import run_cli

from tastemaker.cli import EXIT_USAGE
from tastemaker.config.config_warnings import warn_small_lora_updates
from tastemaker.config.load import list_generator_recipes, load, load_any_config
from tastemaker.config.required_files import (
    find_missing_downloads,
    find_missing_files,
    is_local_path,
    summarize_data,
)
from tastemaker.core.registry import ConfigError


@pytest.fixture(autouse=True)
def working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")


def prompt_file(name: str, text: str) -> str:
    Path(name).write_text(text)
    return f"data={{type: prompt_file, path: {name}}}"


def test_summary_says_how_many_prompts_the_run_sees(capsys: pytest.CaptureFixture[str]) -> None:
    data = prompt_file("prompts.txt", "".join(f"a photo of {i}\n" for i in range(5000)))
    assert run_cli("check", "grpo-toy-flow", data, "steps=19", "batch.prompts=32") == 0
    assert "data: the run sees 608 of 5,000 prompts: 19 steps of 32" in capsys.readouterr().out
    summary = summarize_data(load("grpo-toy-flow", [data, "steps=1250", "batch.prompts=8"]))
    assert "5,000 prompts, each seen about 2 times" in str(summary)


def test_generated_data_has_no_summary() -> None:
    assert summarize_data(load("likelihood-toy-flow")) is None


@pytest.mark.parametrize(
    ("name", "text", "fragment"),
    [
        ("bad.jsonl", '{"prompt": "a red"}\n{"prompt": "a blue"}\n{"prompt": a green}\n', "bad.jsonl, line 3"),
        ("bad.csv", "prompt,count\na red,1\na blue,1,2\n", "bad.csv, line 3"),
        ("empty.txt", "\n", "empty.txt: the file is empty"),
        ("other.jsonl", '{"text": "a red"}\n', "other.jsonl, line 1"),
    ],
)
def test_check_refuses_malformed_prompts(
    name: str, text: str, fragment: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_cli("check", "grpo-toy-flow", prompt_file(name, text)) == EXIT_USAGE
    assert f"data: {fragment}" in capsys.readouterr().err
    with pytest.raises(ConfigError, match=r"^data: .*TM046"):
        summarize_data(load("grpo-toy-flow", [f"data={{type: prompt_file, path: {name}}}"]))


@pytest.mark.parametrize(
    ("recipe", "override"),
    [
        ("srpo-flux-hps", "model.weights=/weights/flux"),
        ("srpo-flux-hps", "model.weights=./flux"),
        ("srpo-flux-hps", "model.transformer=flux.safetensors"),
        ("srpo-flux-hps", "model.embeddings=embedded"),
        ("srpo-flux-hps", "rewards.hps.weights=~/missing/hps.pt"),
        ("grpo-playground-flow", "model.weights=playground/flaw"),
        ("grpo-playground-flow", "model.autoencoder=runs/vae"),
        ("vae-playground", "discriminator={weights: critic.pt}"),
        ("orm-onevision", "judge.weights=../llava"),
    ],
)
def test_missing_files_are_named(recipe: str, override: str) -> None:
    Path("runs").mkdir()
    key, value = override.split("=", 1)
    settings = override.replace("{", "{width: 8, ") if "{" in override else override
    (message,) = find_missing_files(load_any_config(recipe, [settings]))
    assert message.startswith(key) and value.split(": ")[-1].rstrip("}") in message


def test_existing_files_and_published_weights_are_not_missing() -> None:
    Path("flux").mkdir()
    Path("flux.safetensors").touch()
    for settings in ([], ["model.weights=./flux", "model.transformer=flux.safetensors"], ["model.weights=owner/name"]):
        assert find_missing_files(load("srpo-flux-hps", settings)) == []
    for recipe in list_generator_recipes():
        assert find_missing_files(load(recipe)) == [], recipe


def test_weights_that_are_not_downloaded_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tastemaker.config.required_files.find_cached", lambda source: None)
    messages = find_missing_downloads(load("srpo-flux-hps"))
    assert any("tastemaker download black-forest-labs/FLUX.1-dev" in message for message in messages)
    assert find_missing_downloads(load("grpo-playground-flow")) == []
    assert not any(
        "/weights/flux" in x for x in find_missing_downloads(load("srpo-flux-hps", ["model.weights=/weights/flux"]))
    )
    monkeypatch.setattr("tastemaker.config.required_files.find_cached", lambda source: Path())
    assert find_missing_downloads(load("srpo-flux-hps")) == []


def test_check_refuses_a_weights_folder_that_does_not_exist(capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        run_cli("check", "grpo-playground-flow", "model.weights=./flow", "rewards.taste.weights=./taste") == EXIT_USAGE
    )
    error = " ".join(capsys.readouterr().err.split())
    assert "model.weights: the path './flow' does not exist" in error and "rewards.taste.weights" in error


def test_local_paths_differ_from_names() -> None:
    Path("runs").mkdir()
    assert all(map(is_local_path, ["/a/b", "./a", "~/a", "../a", "a.safetensors", "runs/none", Path("a/b")]))
    assert not any(map(is_local_path, ["owner/name", "vq_ds16_c2i", "playground/flow", "tiny", "random:flux"]))


@pytest.mark.parametrize(
    ("recipe", "overrides"),
    [
        ("srpo-flux-hps", ["tuning={type: lora}"]),
        ("srpo-flux-hps", ["tuning={type: lora}", "optim.lr=1e-4"]),
        ("srpo-flux-hps", ["tuning={type: lora}", "steps=100000"]),
        ("grpo-toy-flow", ["tuning={type: lora}", "optim.lr=1e-5"]),
    ],
)
def test_lora_at_rates_for_all_weights_warns(recipe: str, overrides: list[str]) -> None:
    (warning,) = warn_small_lora_updates(load(recipe, overrides))
    assert warning.startswith("optim.lr") and "LoRA" in warning and "set optim.lr=0.0001" in warning


def test_full_tuning_and_shipped_recipes_have_no_lora_warning() -> None:
    assert warn_small_lora_updates(load("srpo-flux-hps", ["optim.lr=1e-9"])) == []
    for recipe in list_generator_recipes():
        assert warn_small_lora_updates(load(recipe)) == [], recipe


@pytest.mark.parametrize("recipe", ["srpo-flux-hps-lora", "srpo-qwen-image-lora", "flowgrpo-sd35", "vader-wan-hps"])
def test_lora_recipes_train_adapters_in_full_precision(recipe: str) -> None:
    config = load(recipe)
    assert config.tuning.is_adapter and config.engine.param_dtype == "fp32" and config.optim.state_dtype == "fp32"
