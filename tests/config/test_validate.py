from typing import Any

import pytest

from tastemaker.config.load import apply_overrides, read_recipe
from tastemaker.config.registries import REWARDS
from tastemaker.config.validate import build_component, validate_config
from tastemaker.core.registry import ConfigError
from tastemaker.core.reward import RewardSpec
from tastemaker.rewards.color import Brightness
from tastemaker.rewards.combinators import Clipped


def sentences(*overrides: str, recipe: str = "grpo-toy-flow") -> list[str]:
    with pytest.raises(ConfigError) as error:
        validate_config(apply_overrides(read_recipe(recipe), overrides))
    return str(error.value).splitlines()


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ("objective.gropu=3", "objective: unknown key 'gropu'; did you mean 'group'?"),
        ("objective.type=grop", "objective: no objective is called 'grop'; did you mean 'grpo'?"),
        ("optim.lr=much", "optim.lr: expected a number, found 'much'"),
        ("optim.lr=true", "optim.lr: expected a number, found true"),
        ("optim.lr=.nan", "optim.lr: expected a finite number, found nan"),
        ("optim.lr=-.inf", "optim.lr: expected a finite number, found -inf"),
        ("optim.lr=1e999", "optim.lr: expected a finite number, found inf"),
        ("optim.lr=-1", "optim.lr: expected at least 0, found -1"),
        ("optim.betas=[0.9]", "optim.betas: expected more than 1 item"),
        ("optim.betas=[0.9, 0.9, 0.9]", "optim.betas: expected 2 items, found 3"),
        ("optim.betas=[0.9, 1]", "optim.betas[1]: expected less than 1, found 1"),
        ("optim=fast", "optim: expected a mapping of settings, found 'fast'"),
        ("batch.prompts=0", "batch.prompts: expected more than 0, found 0"),
        ("batch.prompts=true", "batch.prompts: expected a whole number, found true"),
        ("batch.prompts=8.0", "batch.prompts: expected a whole number, found 8.0"),
        ("batch.prompts=lots", "batch.prompts: expected a whole number, found 'lots'"),
        ("seed=18446744073709551616", "seed: expected a whole number of at most 63 bits, found one of 65"),
        ("watch.wandb=3", "watch.wandb: expected text, found 3"),
        ("watch.tensorboard=1", "watch.tensorboard: expected true or false, found 1"),
        ("output=3", "output: expected a path, found 3"),
        ("sample.prompts=a red", "sample.prompts: expected a list, found 'a red'"),
        ("sample.prompts=[1]", "sample.prompts[0]: expected text, found 1"),
        (
            "engine.device=gpu",
            "engine.device: expected 'auto', 'cuda', 'mps' or 'cpu', found 'gpu'; did you mean 'cpu'?",
        ),
        (
            "engine.precision=bf61",
            "engine.precision: expected 'auto', 'fp32', 'tf32', 'fp16' or 'bf16', found 'bf61'; did you mean 'bf16'?",
        ),
        ("rewards=[]", "rewards: expected a mapping, found a list"),
        ("rewards.color.wieght=2", "rewards.color: unknown key 'wieght'; did you mean 'weight'?"),
        ("rewards.color.weight=big", "rewards.color.weight: expected a number, found 'big'"),
        ("rewards={5: {type: color}}", "rewards: expected names as keys, found 5"),
        ("tuning={type: lora, targets: 3}", "tuning.targets: expected a list or text, found 3"),
        (
            "process.dynamics={type: ddim, eta: 2}",
            "process.dynamics: 'eta' is 2.0; expected a number from 0 (no noise) to 1 (ancestral)",
        ),
        ("process.window={size: x}", "process.window.size: expected a whole number, found 'x'"),
        (
            "process.window.size=50",
            "process: a window of 50 from step 0 does not fit before the last of 10 "
            "steps; make it smaller or take more steps",
        ),
        ("model={type: flux, height: 721}", "model.height: expected a multiple of 16, found 721"),
        (
            "rewards.color={type: remote, url: x}",
            r"rewards.color.url: expected text that fits ^https?://[^/\s]+, found 'x'",
        ),
        ("rewards.color={type: HPS}", "rewards.color: no reward is called 'HPS'; did you mean 'hps'?"),
        ("model=toy_flow", "model: expected a mapping of settings, found 'toy_flow'; write {type: toy_flow}"),
        ("tuning=all", "tuning: expected a mapping of settings with a 'type', one of full, lora, twin; found 'all'"),
        ("tuning.type=[]", "tuning: 'type' is a list; expected one of full, lora, twin"),
        ("tuning={}", "tuning: 'type' is missing; expected one of full, lora, twin"),
        ("tuning={host: true}", "tuning: 'type' is missing; expected one of full, lora, twin"),
        ("name=a/b", "config: 'name' is 'a/b'; expected the name of a directory, without slashes"),
        ("objectiv={}", "config: unknown key 'objectiv'; did you mean 'objective'?"),
        ("model=null", "config: 'model' is missing"),
    ],
)
def test_a_mistake_is_one_sentence(change: str, sentence: str) -> None:
    if change == "tuning={}" or change == "tuning={host: true}":
        data: Any = {**read_recipe("grpo-toy-flow"), "tuning": {"host": True} if "host" in change else {}}
        with pytest.raises(ConfigError) as error:
            validate_config(data)
        assert str(error.value) == sentence
    else:
        assert sentences(change) == [sentence]


@pytest.mark.parametrize(
    ("change", "hint"),
    [
        ("through=last", "VADER's 'last' is 'tail' here, with tail: 1"),
        ("through=rand", "did you mean 'random'?"),
        ("frames=firts", "did you mean 'first'?"),
        ("frames=rand", "did you mean 'random'?"),
    ],
)
def test_a_choice_that_is_misspelt_or_called_so_by_others_has_a_hint(change: str, hint: str) -> None:
    (sentence,) = sentences(f"objective.{change}", recipe="draft-toy-flow")
    assert sentence.endswith(f", found '{change.partition('=')[2]}'; {hint}")


def test_a_word_like_no_choice_has_no_hint() -> None:
    (sentence,) = sentences("objective.frames=everything", recipe="draft-toy-flow")
    assert sentence.endswith("or a whole number or a list, found 'everything'")


def test_every_mistake_is_told_at_once_in_the_order_of_the_sections() -> None:
    found = sentences(
        "optim.lr=much", "objective.gropu=3", "rewards.color.type=colour", "steps=-3", "rewards.hps.weight=1"
    )
    known = ", ".join(sorted(REWARDS))
    assert found == [
        "objective: unknown key 'gropu'; did you mean 'group'?",
        "rewards.color: no reward is called 'colour'; did you mean 'color'?",
        f"rewards.hps: 'type' is missing; expected one of {known}",
        "optim.lr: expected a number, found 'much'",
        "steps: expected more than 0, found -3",
    ]


def test_mistakes_inside_a_reward_of_rewards_have_their_place() -> None:
    found = sentences("rewards.c={type: clipped, low: 0, of: {type: clipped, high: 1, of: {type: jpeg, quality: 900}}}")
    assert found == ["rewards.c.of.of: a JPEG's quality is 900; expected a whole number from 1 to 100"]


def test_a_reward_of_rewards_is_read_whole() -> None:
    spec = build_component(RewardSpec, {"type": "clipped", "low": 0, "of": {"type": "brightness", "target": 0.5}})
    assert spec == Clipped(Brightness(0.5), low=0.0)


def test_a_component_can_be_built_by_itself_and_says_where_it_was_asked_for() -> None:
    with pytest.raises(ConfigError, match=r"^--reward\.quality: expected a whole number, found 'x'$"):
        build_component(RewardSpec, {"type": "jpeg", "quality": "x"}, "--reward")


def test_a_configuration_that_is_no_mapping_is_refused() -> None:
    junk: tuple[object, ...] = (None, [], 3, "words")
    for data in junk:
        with pytest.raises(ConfigError, match=r"^config: expected a mapping of settings, found "):
            validate_config(data)


def test_values_and_keys_of_any_length_make_short_sentences() -> None:
    (sentence,) = sentences(f"optim.{'x' * 9000}={'y' * 9000}")
    assert len(sentence) < 200
    (sentence,) = sentences(f"optim.lr={'y' * 9000}")
    assert len(sentence) < 200


def test_braces_in_values_are_no_template() -> None:
    assert sentences("optim.lr='{sentence}{}'") == ["optim.lr: expected a number, found '{sentence}{}'"]


@pytest.mark.parametrize("depth", [10, 100, 300, 1000, 20_000])
def test_a_reward_of_very_many_rewards_is_read_or_refused(depth: int) -> None:
    spec: dict[str, Any] = {"type": "jpeg", "quality": 900}
    for _ in range(depth):
        spec = {"type": "clipped", "low": 0, "of": spec}
    with pytest.raises(ConfigError, match=r"quality is 900|nested too deeply"):
        build_component(RewardSpec, spec)
