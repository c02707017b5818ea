"""Every recipe of the package: it loads, is consistent, round-trips, and its first lines describe it."""

import pytest

from tastemaker.config.check import find_problems
from tastemaker.config.dump import config_to_dict, config_to_yaml
from tastemaker.config.load import list_generator_recipes, list_recipes, load
from tastemaker.config.recipes import RECIPES, list_trainable_recipes, recipe_paths
from tastemaker.config.validate import validate_config
from tastemaker.config.yaml_io import parse_yaml
from tastemaker.core.registry import ConfigError


def test_every_recipe_is_valid() -> None:
    problems = {}
    for name in list_generator_recipes():
        try:
            problems[name] = find_problems(load(name), world_size=1)
        except ConfigError as error:
            problems[name] = [str(error)]
    assert {name: messages for name, messages in problems.items() if messages} == {}


def test_resolved_recipe_has_all_defaults_and_round_trips() -> None:
    wrong = []
    for name in list_generator_recipes():
        config = load(name)
        resolved = config_to_dict(config)
        if validate_config(resolved) != config or resolved["engine"]["device"] != "auto":
            wrong.append(name)
        if resolved["process"]["type"] not in ("gaussian", "autoregressive", "masked"):
            wrong.append(name)
    assert not wrong


DUMPED = (  # every process, videos, LoRA, judges, nested rewards and prompt files
    "grpo-toy-causal",
    "dpo-toy-masked",
    "reward-gradient-toy-video",
    "vader-wan-hps",
    "srpo-flux-hps",
    "flowgrpo-sd35",
    "dpo-iter-parm-showo",
    "nft-playground",
)


@pytest.mark.parametrize("names", [DUMPED, pytest.param(None, marks=pytest.mark.slow, id="all")])
def test_dumped_recipe_round_trips(names: tuple[str, ...] | None) -> None:
    configs = {name: load(name) for name in names or list_generator_recipes()}
    assert [
        name
        for name, config in configs.items()
        if validate_config(parse_yaml(config_to_yaml(config), "dump")) != config
    ] == []


def test_recipe_begins_with_description_and_command() -> None:
    wrong, trainable = [], set(list_generator_recipes())
    for name in list_recipes():
        lines = recipe_paths()[name].read_text().splitlines()
        command = name not in trainable or lines[1:2] == [f"# tastemaker train {name}"]
        if not (lines[0].startswith("# ") and lines[0].endswith(".") and command):
            wrong.append(name)
    assert not wrong


def test_recipes_are_in_the_folder_of_their_family() -> None:
    paths = recipe_paths()
    assert paths["grpo-playground-flow"] == RECIPES / "playground" / "grpo-playground-flow.yaml"
    assert paths["models/flux"] == RECIPES / "base" / "models" / "flux.yaml"
    assert "models/flux" not in list_trainable_recipes() and "base" not in list_trainable_recipes()
    assert not list(RECIPES.glob("*.yaml"))
    assert len(paths) == len(list(RECIPES.rglob("*.yaml")))
