"""Validation of configurations: every mistake is reported with its key, the value and what is expected."""

from typing import Any

import pytest

from tastemaker.config.load import apply_overrides, read_recipe
from tastemaker.config.registries import REWARDS
from tastemaker.config.validate import build_component, validate_config
from tastemaker.core.registry import ConfigError
from tastemaker.core.reward import RewardSpec
from tastemaker.rewards.color import BrightnessReward
from tastemaker.rewards.wrappers import ClippedReward


def validation_errors(*overrides: str, recipe: str = "grpo-toy-flow") -> list[str]:
    with pytest.raises(ConfigError) as error:
        validate_config(apply_overrides(read_recipe(recipe), overrides))
    return str(error.value).splitlines()


@pytest.mark.parametrize(
    ("change", "key", "fragments"),
    [
        ("objective.gropu_size=3", "objective", ["'gropu_size'", "'group_size'"]),
        ("objective.type=grop", "objective", ["'grop'", "'grpo'"]),
        ("optim.lr=much", "optim.lr", ["a number", "'much'"]),
        ("optim.lr=true", "optim.lr", ["a number", "true"]),
        ("optim.lr=.nan", "optim.lr", ["finite", "nan"]),
        ("optim.lr=-.inf", "optim.lr", ["finite", "-inf"]),
        ("optim.lr=1e999", "optim.lr", ["finite", " inf"]),
        ("optim.lr=-1", "optim.lr", ["at least 0", "-1"]),
        ("optim.betas=[0.9]", "optim.betas", ["more than 1 item"]),
        ("optim.betas=[0.9, 0.9, 0.9]", "optim.betas", ["2 items", "got 3"]),
        ("optim.betas=[0.9, 1]", "optim.betas[1]", ["less than 1", "got 1"]),
        ("optim=fast", "optim", ["a mapping", "'fast'"]),
        ("batch.prompts=0", "batch.prompts", ["more than 0", "got 0"]),
        ("batch.prompts=true", "batch.prompts", ["an integer", "true"]),
        ("batch.prompts=8.0", "batch.prompts", ["an integer", "8.0"]),
        ("batch.prompts=lots", "batch.prompts", ["an integer", "'lots'"]),
        ("seed=18446744073709551616", "seed", ["63 bits", "65"]),
        ("loggers=[{type: wandb, project: 3}]", "loggers[0].project", ["text", "got 3"]),
        ("loggers=[tensorbord]", "loggers[0].type", ["'tensorboard'", "'trackio'", "mean 'tensorboard'"]),
        ("loggers=[wandb, {type: trackio, projekt: mine}]", "loggers[1]", ["projekt", "'project'?"]),
        ("loggers=[{type: tensorboard, project: mine}]", "loggers[0]", ["'project'"]),
        ("loggers=[1]", "loggers[0]", ["a mapping", "got 1"]),
        ("loggers.wandb=mine", "loggers", ["a list", "a mapping"]),
        ("output_dir=3", "output_dir", ["a path", "got 3"]),
        ("sample.prompts=a red", "sample.prompts", ["a list", "'a red'"]),
        ("sample.prompts=[1]", "sample.prompts[0]", ["text", "got 1"]),
        ("engine.device=gpu", "engine.device", ["'auto', 'cuda', 'mps' or 'cpu'", "'gpu'", "mean 'cpu'"]),
        (
            "engine.precision=bf61",
            "engine.precision",
            ["'auto', 'fp32', 'tf32', 'fp16' or 'bf16'", "'bf61'", "mean 'bf16'"],
        ),
        ("rewards=[]", "rewards", ["a mapping", "a list"]),
        ("rewards.color.wieght=2", "rewards.color", ["'wieght'", "'weight'"]),
        ("rewards.color.weight=big", "rewards.color.weight", ["a number", "'big'"]),
        ("rewards={5: {type: color}}", "rewards", ["names as keys", "got 5"]),
        ("tuning={type: lora, target_modules: 3}", "tuning.target_modules", ["a list or text", "got 3"]),
        ("process.dynamics={type: ddim, eta: 2}", "process.dynamics", ["'eta'", "2.0", "from 0"]),
        ("process.window={size: x}", "process.window.size", ["an integer", "'x'"]),
        ("process.window.size=50", "process", ["window of 50", "step 0", "10 steps"]),
        ("model={type: flux, height: 721}", "model.height", ["multiple of 16", "721"]),
        ("rewards.color={type: remote, url: x}", "rewards.color", ["'url'", "http://", "'x'"]),
        ("rewards.color={type: remote, url: ['http://a', 'b']}", "rewards.color", ["'url'", "http://", "'b'"]),
        ("rewards.color={type: HPS}", "rewards.color", ["'HPS'", "'hps'"]),
        ("model=toy_flow", "model", ["a mapping", "'toy_flow'", "{type: toy_flow}"]),
        ("tuning=all", "tuning", ["'type'", "frozen_copy, full, lora", "'all'"]),
        ("tuning.type=[]", "tuning", ["'type'", "a list", "frozen_copy, full, lora"]),
        ("name=a/b", "config", ["'name'", "'a/b'", "slashes"]),
        ("objectiv={}", "config", ["'objectiv'", "'objective'"]),
        ("model=null", "config", ["'model'", "missing"]),
    ],
)
def test_invalid_setting_is_reported_in_one_line(change: str, key: str, fragments: list[str]) -> None:
    (error,) = validation_errors(change)
    assert error.startswith(f"{key}: ") and all(fragment in error for fragment in fragments), error


@pytest.mark.parametrize("tuning", [{}, {"snapshots_on_cpu": True}])
def test_missing_type_lists_the_types(tuning: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"^tuning: 'type'.* frozen_copy, full, lora.*TM057"):
        validate_config({**read_recipe("grpo-toy-flow"), "tuning": tuning})


@pytest.mark.parametrize(
    ("change", "hint"),
    [
        ("gradient_mode=last", "'last_steps' with last_steps: 1"),
        ("gradient_mode=rand", "'random'?"),
        ("frames=firts", "'first'?"),
        ("frames=rand", "'random'?"),
    ],
)
def test_misspelled_choices_have_a_suggestion(change: str, hint: str) -> None:
    (error,) = validation_errors(f"objective.{change}", recipe="draft-toy-flow")
    key, _, value = change.partition("=")
    assert (
        error.startswith(f"objective.{key}: ")
        and f"got '{value}'; " in error
        and error.partition(" [TM")[0].endswith(hint)
    )


def test_settings_of_another_name_are_named() -> None:
    (error,) = validation_errors("objective.through=leap", recipe="leap-toy-flow")
    assert error == "objective: unknown key 'through'; use 'gradient_mode' [TM820]"
    (error,) = validation_errors("objective.through=leap")  # grpo has no such setting
    assert "gradient_mode" not in error and "TM820" in error


def test_unknown_choices_have_no_suggestion() -> None:
    (error,) = validation_errors("objective.frames=everything", recipe="draft-toy-flow")
    assert error.startswith("objective.frames: ") and error.endswith("got 'everything' [TM063]")


def test_all_errors_are_reported_in_section_order() -> None:
    errors = validation_errors(
        "optim.lr=much", "objective.gropu_size=3", "rewards.color.type=colour", "steps=-3", "rewards.hps.weight=1"
    )
    keys = ["objective", "rewards.color", "rewards.hps", "optim.lr", "steps"]
    assert [error.partition(": ")[0] for error in errors] == keys
    details = ["'gropu_size'", "'colour'", ", ".join(sorted(REWARDS)), "'much'", "-3"]
    assert all(detail in error for error, detail in zip(errors, details, strict=True)), errors


def test_errors_in_nested_rewards_have_their_location() -> None:
    (error,) = validation_errors(
        "rewards.c={type: clipped, min: 0, reward: {type: clipped, max: 1, reward: {type: jpeg, quality: 900}}}"
    )
    assert error.startswith("rewards.c.reward.reward: 'quality'") and "900" in error


def test_nested_rewards_are_read() -> None:
    spec = build_component(RewardSpec, {"type": "clipped", "min": 0, "reward": {"type": "brightness", "target": 0.5}})
    assert spec == ClippedReward(BrightnessReward(0.5), min=0.0)


def test_build_component_reports_its_location() -> None:
    with pytest.raises(ConfigError, match=r"^--reward\.quality: .*'x'.*TM825"):
        build_component(RewardSpec, {"type": "jpeg", "quality": "x"}, "--reward")


def test_config_must_be_a_mapping() -> None:
    invalid: tuple[object, ...] = (None, [], 3, "words")
    for data in invalid:
        with pytest.raises(ConfigError, match=r"^config: .*a mapping.*TM054"):
            validate_config(data)


def test_long_values_are_shortened_in_messages() -> None:
    (error,) = validation_errors(f"optim.{'x' * 9000}={'y' * 9000}")
    assert len(error) < 200
    (error,) = validation_errors(f"optim.lr={'y' * 9000}")
    assert len(error) < 200


def test_braces_in_values_are_kept() -> None:
    (error,) = validation_errors("optim.lr='{value}{}'")
    assert error.startswith("optim.lr: ") and "got '{value}{}'; " in error and error.endswith(" [TM825]")


@pytest.mark.parametrize("depth", [10, 100, 300, 1000, 20_000])
def test_deeply_nested_rewards_are_read_or_refused(depth: int) -> None:
    spec: dict[str, Any] = {"type": "jpeg", "quality": 900}
    for _ in range(depth):
        spec = {"type": "clipped", "min": 0, "reward": spec}
    with pytest.raises(ConfigError, match=r"'quality'.* 900|nested too deeply"):
        build_component(RewardSpec, spec)
