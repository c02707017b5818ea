"""A run directory is resumed only with the configuration it was started with, unless changes are allowed."""

from pathlib import Path

import pytest

from tastemaker.config.build import build
from tastemaker.config.load import load
from tastemaker.config.yaml_io import parse_yaml, render_yaml
from tastemaker.core.registry import ConfigError
from tastemaker.training.run_directory import claim_run_directory, suggest_allow_change, write_run_config

OVERRIDES = ["sample.every=0", "guard.every=0", "batch.prompts=4", "steps=2"]


def test_refused_changes_name_the_options_that_allow_them(tmp_path: Path) -> None:
    config = load("grpo-toy-flow", OVERRIDES)
    write_run_config(config, tmp_path)
    build(config, tmp_path).save(1)
    changed = load("grpo-toy-flow", [*OVERRIDES, "steps=1", "optim.lr=0.5"])
    with pytest.raises(ConfigError, match=r"--allow-change.*TM291"):
        claim_run_directory(changed, tmp_path, ())
    assert claim_run_directory(changed, tmp_path, ["optim.lr", "steps"]) is not None
    device = "engine.device=cpu" if config.engine.device != "cpu" else "engine.device=auto"
    moved = load("grpo-toy-flow", [*OVERRIDES, device])  # the device is not part of a run's identity
    assert claim_run_directory(moved, tmp_path, ()) == tmp_path / "checkpoints/step-000001"


def test_more_steps_are_always_allowed(tmp_path: Path) -> None:
    config = load("grpo-toy-flow", OVERRIDES)
    write_run_config(config, tmp_path)
    build(config, tmp_path).save(2)
    latest = tmp_path / "checkpoints/step-000002"
    assert claim_run_directory(load("grpo-toy-flow", [*OVERRIDES, "steps=3"]), tmp_path, ()) == latest
    with pytest.raises(ConfigError, match=r"\(steps: 2 -> 1\).*TM291"):
        claim_run_directory(load("grpo-toy-flow", [*OVERRIDES, "steps=1"]), tmp_path, ())
    with pytest.raises(ConfigError, match=r"\(optim\.lr: 0\.001 -> 0\.5\).*TM291"):
        claim_run_directory(load("grpo-toy-flow", [*OVERRIDES, "steps=3", "optim.lr=0.5"]), tmp_path, ())


def test_setting_that_an_older_run_did_not_have_is_at_its_default(tmp_path: Path) -> None:
    config = load("grpo-toy-flow", OVERRIDES)
    write_run_config(config, tmp_path)
    build(config, tmp_path).save(1)
    file = tmp_path / "config.yaml"
    settings = parse_yaml(file.read_text(), "config.yaml")
    del settings["engine"]["rollout_precision"], settings["checkpoint"]["asynchronous"]
    file.write_text(render_yaml(settings))
    assert claim_run_directory(config, tmp_path, ()) == tmp_path / "checkpoints/step-000001"
    changed = load("grpo-toy-flow", [*OVERRIDES, "checkpoint.asynchronous=true"])
    with pytest.raises(ConfigError, match=r"\(checkpoint\.asynchronous: False -> True\).*TM291"):
        claim_run_directory(changed, tmp_path, ())
    settings["engine"]["removed_setting"] = 1
    file.write_text(render_yaml(settings))
    with pytest.raises(ConfigError, match=r"engine\.removed_setting: 1 -> absent.*TM291"):
        claim_run_directory(config, tmp_path, ())


def test_suggestion_groups_many_changes_by_section() -> None:
    assert suggest_allow_change(["optim.lr", "optim.max_grad_norm", "model.variant", "steps", "optim.eps"]) == (
        "--allow-change model --allow-change optim --allow-change steps"
    )
