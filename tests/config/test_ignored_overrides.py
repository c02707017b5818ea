"""`--tiny` warns of overrides that tiny models ignore."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest

from tastemaker.cli import main
from tastemaker.config.build import find_ignored_overrides, warn_ignored_overrides
from tastemaker.config.load import load, load_any_config


def ignored_overrides(recipe: str, *overrides: str) -> list[str]:
    return find_ignored_overrides(load_any_config(recipe, overrides), overrides)


def test_overrides_that_tiny_models_replace_are_listed() -> None:
    changes = ["model.frames=9", "model.height=48", "rewards.hps.weights=/nothere"]
    assert (
        ignored_overrides("vader-wan-hps", *changes, "steps=1", "process.num_steps=3", "rewards.hps.weight=2")
        == changes
    )
    assert ignored_overrides("vader-opensora-detection", "rewards.detection.objects=unicorn") == [
        "rewards.detection.objects=unicorn"
    ]


def test_override_equal_to_the_tiny_value_is_not_listed() -> None:
    small = load("vader-wan-hps").model.tiny()
    assert ignored_overrides("vader-wan-hps", f"model.frames={small.frames}") == []


def test_only_ignored_settings_of_a_section_are_listed() -> None:
    assert ignored_overrides("vader-wan-hps", "model={type: wan, frames: 9}") == ["model.frames=9"]
    assert ignored_overrides("grpo-toy-flow", "engine={compile: true, precision: bf16}") == ["engine.compile=true"]


def test_last_of_repeated_overrides_is_listed() -> None:
    assert ignored_overrides("vader-wan-hps", "model.frames=13", "model.frames=9") == ["model.frames=9"]


def test_removed_sections_are_not_listed() -> None:
    assert ignored_overrides("dancegrpo-toy-flow", "rewards.small=null", "guidance=null", "guard=null") == []
    assert ignored_overrides("llamagen-vq", "discriminator=null", "loss=null", "validation=null") == []


def test_recipe_settings_are_not_listed(tmp_path: Path) -> None:
    (tmp_path / "own.yaml").write_text("extends: vader-wan-hps\nmodel: {frames: 9}")
    assert ignored_overrides(str(tmp_path / "own.yaml")) == []


@pytest.mark.parametrize(
    "changes",
    [
        ["model.frames=9"],
        ["model.frames=9", "model.height=48"],
        ["model.frames=9", "model.height=48", "model.width=64"],
    ],
)
def test_ignored_overrides_give_one_warning(changes: list[str]) -> None:
    with pytest.warns(UserWarning, match="^--tiny: ") as warned:
        warn_ignored_overrides(load("vader-wan-hps", changes), changes)
    (warning,) = warned
    assert str(warning.message).startswith(f"--tiny: {', '.join(changes)} ")


def test_used_overrides_give_no_warning() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_ignored_overrides(load("grpo-toy-flow", ["steps=3"]), ["steps=3"])


def test_command_warns_before_building(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.warns(UserWarning, match=r"^--tiny: model\.frames=9 "), pytest.raises(SystemExit):
        main(["train", "vader-wan-hps", "--tiny", "model.frames=9", "objective.last_steps=99"])
    assert "TM789" in capsys.readouterr().err
