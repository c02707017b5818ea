"""What is said of settings that a run at small size does not use."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest

from tastemaker.cli import main
from tastemaker.config.ignored_overrides import find_ignored_overrides, warn_ignored_overrides
from tastemaker.config.load import load, load_any_config


def lost(recipe: str, *overrides: str) -> list[str]:
    return find_ignored_overrides(load_any_config(recipe, overrides), overrides)


def test_settings_that_small_models_have_a_value_of_their_own_for_are_named() -> None:
    changes = ["model.frames=9", "model.height=48", "rewards.hps.weights=/nothere"]
    assert lost("vader-wan-hps", *changes, "steps=1", "process.steps=3", "rewards.hps.weight=2") == changes
    assert lost("vader-opensora-detection", "rewards.detection.target=unicorn") == ["rewards.detection.target=unicorn"]


def test_a_setting_that_happens_to_be_a_small_models_own_is_used() -> None:
    small = load("vader-wan-hps").model.tiny()
    assert lost("vader-wan-hps", f"model.frames={small.frames}") == []


def test_of_a_whole_section_only_the_settings_that_are_lost_are_named() -> None:
    assert lost("vader-wan-hps", "model={type: wan, frames: 9}") == ["model.frames=9"]
    assert lost("grpo-toy-flow", "engine={compile: true, precision: bf16}") == ["engine.compile=true"]


def test_of_a_setting_given_twice_the_last_counts() -> None:
    assert lost("vader-wan-hps", "model.frames=13", "model.frames=9") == ["model.frames=9"]


def test_what_is_taken_away_is_not_missed() -> None:
    assert lost("dancegrpo-toy-flow", "rewards.small=null", "guidance=null", "guard=null") == []
    assert lost("llamagen-vq", "critic=null", "loss=null", "validation=null") == []


def test_a_recipes_own_settings_are_not_the_command_lines(tmp_path: Path) -> None:
    (tmp_path / "own.yaml").write_text("extends: vader-wan-hps\nmodel: {frames: 9}")
    assert lost(str(tmp_path / "own.yaml")) == []


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        (["model.frames=9"], "model.frames=9 is not used"),
        (["model.frames=9", "model.height=48"], "model.frames=9 and model.height=48 are not used"),
        (
            ["model.frames=9", "model.height=48", "model.width=64"],
            "model.frames=9, model.height=48 and model.width=64 are not used",
        ),
    ],
)
def test_it_is_one_sentence(changes: list[str], told: str) -> None:
    with pytest.warns(UserWarning, match="^--tiny: ") as found:
        warn_ignored_overrides(load("vader-wan-hps", changes), changes)
    assert [str(each.message) for each in found] == [f"--tiny: {told}; small models have settings of their own"]


def test_where_everything_is_used_nothing_is_said() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_ignored_overrides(load("grpo-toy-flow", ["steps=3"]), ["steps=3"])


def test_a_command_says_it_before_anything_is_built(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.warns(UserWarning, match=r"^--tiny: model\.frames=9 is not used"), pytest.raises(SystemExit):
        main(["train", "vader-wan-hps", "--tiny", "model.frames=9", "objective.tail=99"])
    assert "error: objective: reward_gradient reaches for a tail of 99" in capsys.readouterr().err
