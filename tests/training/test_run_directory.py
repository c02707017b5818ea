"""What may differ between a run and the one whose directory it goes on in."""

from pathlib import Path

import pytest

from tastemaker.config.build import build
from tastemaker.config.load import load
from tastemaker.core.registry import ConfigError
from tastemaker.training.run_directory import claim_run_directory, suggest_allow_change, write_run_config

RECIPE = ["sample.every=0", "guard.every=0", "batch.prompts=4", "steps=1"]


def test_every_setting_that_differs_can_be_allowed_by_what_is_said(tmp_path: Path) -> None:
    config = load("grpo-toy-flow", RECIPE)
    write_run_config(config, tmp_path)
    build(config, tmp_path).save(1)
    other = load("grpo-toy-flow", [*RECIPE, "steps=2", "optim.lr=0.5"])
    with pytest.raises(ConfigError, match=r"add --allow-change optim\.lr --allow-change steps, choose another name"):
        claim_run_directory(other, tmp_path, ())
    assert claim_run_directory(other, tmp_path, ["optim.lr", "steps"]) is not None


def test_many_settings_are_allowed_by_their_sections() -> None:
    assert suggest_allow_change(["optim.lr", "optim.max_grad_norm", "model.variant", "steps", "optim.eps"]) == (
        "--allow-change model --allow-change optim --allow-change steps"
    )
