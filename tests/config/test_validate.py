from typing import Any

import pytest

from tastemaker.config.load import apply_overrides, read_recipe
from tastemaker.config.registries import REWARDS
from tastemaker.config.validate import build_component, validate_config
from tastemaker.core.registry import ConfigError
from tastemaker.core.reward import RewardSpec
from tastemaker.rewards.color import BrightnessReward
from tastemaker.rewards.wrappers import ClippedReward


def sentences(*overrides: str, recipe: str = "grpo-toy-flow") -> list[str]:
    with pytest.raises(ConfigError) as error:
        validate_config(apply_overrides(read_recipe(recipe), overrides))
    return str(error.value).splitlines()


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ("objective.gropu_size=3", "objective: unknown key 'gropu_size'; did you mean 'group_size'?"),
        ("objective.type=grop", "objective: no objective is called 'grop'; did you mean 'grpo'?"),
        ("optim.lr=much", "optim.lr: expected a number, got 'much'"),
        ("optim.lr=true", "optim.lr: expected a number, got true"),
        ("optim.lr=.nan", "optim.lr: expected a finite number, got nan"),
        ("optim.lr=-.inf", "optim.lr: expected a finite number, got -inf"),
        ("optim.lr=1e999", "optim.lr: expected a finite number, got inf"),
        ("optim.lr=-1", "optim.lr: expected at least 0, got -1"),
        ("optim.betas=[0.9]", "optim.betas: expected more than 1 item"),
        ("optim.betas=[0.9, 0.9, 0.9]", "optim.betas: expected 2 items, got 3"),
        ("optim.betas=[0.9, 1]", "optim.betas[1]: expected less than 1, got 1"),
        ("optim=fast", "optim: expected a mapping of settings, got 'fast'"),
        ("batch.prompts=0", "batch.prompts: expected more than 0, got 0"),
        ("batch.prompts=true", "batch.prompts: expected an integer, got true"),
        ("batch.prompts=8.0", "batch.prompts: expected an integer, got 8.0"),
        ("batch.prompts=lots", "batch.prompts: expected an integer, got 'lots'"),
        ("seed=18446744073709551616", "seed: expected an integer of at most 63 bits, got one of 65"),
        ("loggers.wandb=3", "loggers.wandb: expected text, got 3"),
        ("loggers.tensorboard=1", "loggers.tensorboard: expected true or false, got 1"),
        ("output_dir=3", "output_dir: expected a path, got 3"),
        ("sample.prompts=a red", "sample.prompts: expected a list, got 'a red'"),
        ("sample.prompts=[1]", "sample.prompts[0]: expected text, got 1"),
        (
            "engine.device=gpu",
            "engine.device: expected 'auto', 'cuda', 'mps' or 'cpu', got 'gpu'; did you mean 'cpu'?",
        ),
        (
            "engine.precision=bf61",
            "engine.precision: expected 'auto', 'fp32', 'tf32', 'fp16' or 'bf16', got 'bf61'; did you mean 'bf16'?",
        ),
        ("rewards=[]", "rewards: expected a mapping, got a list"),
        ("rewards.color.wieght=2", "rewards.color: unknown key 'wieght'; did you mean 'weight'?"),
        ("rewards.color.weight=big", "rewards.color.weight: expected a number, got 'big'"),
        ("rewards={5: {type: color}}", "rewards: expected names as keys, got 5"),
        ("tuning={type: lora, target_modules: 3}", "tuning.target_modules: expected a list or text, got 3"),
        (
            "process.dynamics={type: ddim, eta: 2}",
            "process.dynamics: 'eta' is 2.0; expected a number from 0 (no noise) to 1 (ancestral)",
        ),
        ("process.window={size: x}", "process.window.size: expected an integer, got 'x'"),
        (
            "process.window.size=50",
            "process: a window of 50 from step 0 does not fit before the last of 10 "
            "steps; make it smaller or use more steps",
        ),
        ("model={type: flux, height: 721}", "model.height: expected a multiple of 16, got 721"),
        (
            "rewards.color={type: remote, url: x}",
            r"rewards.color.url: expected text that matches ^https?://[^/\s]+, got 'x'",
        ),
        ("rewards.color={type: HPS}", "rewards.color: no reward is called 'HPS'; did you mean 'hps'?"),
        ("model=toy_flow", "model: expected a mapping of settings, got 'toy_flow'; write {type: toy_flow}"),
        (
            "tuning=all",
            "tuning: expected a mapping of settings with a 'type', one of frozen_copy, full, lora; got 'all'",
        ),
        ("tuning.type=[]", "tuning: 'type' is a list; expected one of frozen_copy, full, lora"),
        ("tuning={}", "tuning: 'type' is missing; expected one of frozen_copy, full, lora"),
        ("tuning={snapshots_on_cpu: true}", "tuning: 'type' is missing; expected one of frozen_copy, full, lora"),
        ("name=a/b", "config: 'name' is 'a/b'; expected the name of a directory, without slashes"),
        ("objectiv={}", "config: unknown key 'objectiv'; did you mean 'objective'?"),
        ("model=null", "config: 'model' is missing"),
    ],
)
def test_a_mistake_is_one_sentence(change: str, sentence: str) -> None:
    if change == "tuning={}" or change == "tuning={snapshots_on_cpu: true}":
        data: Any = {**read_recipe("grpo-toy-flow"), "tuning": {"snapshots_on_cpu": True} if "host" in change else {}}
        with pytest.raises(ConfigError) as error:
            validate_config(data)
        assert str(error.value) == sentence
    else:
        assert sentences(change) == [sentence]


@pytest.mark.parametrize(
    ("change", "hint"),
    [
        ("gradient_mode=last", "VADER's 'last' is 'last_steps' with last_steps: 1"),
        ("gradient_mode=rand", "did you mean 'random'?"),
        ("frames=firts", "did you mean 'first'?"),
        ("frames=rand", "did you mean 'random'?"),
    ],
)
def test_misspelled_choices_have_a_suggestion(change: str, hint: str) -> None:
    (sentence,) = sentences(f"objective.{change}", recipe="draft-toy-flow")
    assert sentence.endswith(f", got '{change.partition('=')[2]}'; {hint}")


def test_unknown_choices_have_no_suggestion() -> None:
    (sentence,) = sentences("objective.frames=everything", recipe="draft-toy-flow")
    assert sentence.endswith("or an integer or a list, got 'everything'")


def test_all_errors_are_reported_in_section_order() -> None:
    found = sentences(
        "optim.lr=much", "objective.gropu_size=3", "rewards.color.type=colour", "steps=-3", "rewards.hps.weight=1"
    )
    known = ", ".join(sorted(REWARDS))
    assert found == [
        "objective: unknown key 'gropu_size'; did you mean 'group_size'?",
        "rewards.color: no reward is called 'colour'; did you mean 'color'?",
        f"rewards.hps: 'type' is missing; expected one of {known}",
        "optim.lr: expected a number, got 'much'",
        "steps: expected more than 0, got -3",
    ]


def test_errors_in_nested_rewards_have_their_location() -> None:
    found = sentences(
        "rewards.c={type: clipped, min: 0, reward: {type: clipped, max: 1, reward: {type: jpeg, quality: 900}}}"
    )
    assert found == ["rewards.c.reward.reward: 'quality' of a JPEG is 900; expected a whole number from 1 to 100"]


def test_nested_rewards_are_read() -> None:
    spec = build_component(RewardSpec, {"type": "clipped", "min": 0, "reward": {"type": "brightness", "target": 0.5}})
    assert spec == ClippedReward(BrightnessReward(0.5), min=0.0)


def test_build_component_reports_its_location() -> None:
    with pytest.raises(ConfigError, match=r"^--reward\.quality: expected an integer, got 'x'$"):
        build_component(RewardSpec, {"type": "jpeg", "quality": "x"}, "--reward")


def test_config_must_be_a_mapping() -> None:
    junk: tuple[object, ...] = (None, [], 3, "words")
    for data in junk:
        with pytest.raises(ConfigError, match=r"^config: expected a mapping of settings, got "):
            validate_config(data)


def test_long_values_are_shortened_in_messages() -> None:
    (sentence,) = sentences(f"optim.{'x' * 9000}={'y' * 9000}")
    assert len(sentence) < 200
    (sentence,) = sentences(f"optim.lr={'y' * 9000}")
    assert len(sentence) < 200


def test_braces_in_values_are_kept() -> None:
    assert sentences("optim.lr='{sentence}{}'") == ["optim.lr: expected a number, got '{sentence}{}'"]


@pytest.mark.parametrize("depth", [10, 100, 300, 1000, 20_000])
def test_deeply_nested_rewards_are_read_or_refused(depth: int) -> None:
    spec: dict[str, Any] = {"type": "jpeg", "quality": 900}
    for _ in range(depth):
        spec = {"type": "clipped", "min": 0, "reward": spec}
    with pytest.raises(ConfigError, match=r"'quality' of a JPEG is 900|nested too deeply"):
        build_component(RewardSpec, spec)
