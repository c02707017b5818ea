"""Every recipe of the package: it loads, is consistent, round-trips, and its first lines describe it."""

import pytest

from tastemaker.config.check import find_problems
from tastemaker.config.dump import config_to_dict, config_to_yaml
from tastemaker.config.load import RECIPES, generator_recipes, list_recipes, load
from tastemaker.config.validate import validate_config
from tastemaker.config.yaml_io import parse_yaml
from tastemaker.core.registry import ConfigError


def test_every_recipe_loads_without_complaints() -> None:
    found = {}
    for name in generator_recipes():
        try:
            found[name] = find_problems(load(name), world=1)
        except ConfigError as error:
            found[name] = [str(error)]
    assert {name: told for name, told in found.items() if told} == {}


def test_resolving_a_recipe_writes_every_default_and_round_trips() -> None:
    wrong = []
    for name in generator_recipes():
        config = load(name)
        resolved = config_to_dict(config)
        if validate_config(resolved) != config or resolved["engine"]["device"] != "auto":
            wrong.append(name)
        if resolved["process"]["type"] not in ("gaussian", "autoregressive", "masked"):
            wrong.append(name)
    assert not wrong


DUMPED = (  # as YAML: every family of processes, clips, adapters, judges, rewards of rewards, prompts in a file
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
def test_a_dumped_recipe_is_parsed_back_to_the_same_run(names: tuple[str, ...] | None) -> None:
    configs = {name: load(name) for name in names or generator_recipes()}
    assert [
        name
        for name, config in configs.items()
        if validate_config(parse_yaml(config_to_yaml(config), "dump")) != config
    ] == []


def test_the_first_lines_of_a_recipe_describe_it_and_give_its_command() -> None:
    wrong, whole = [], set(generator_recipes())
    for name in list_recipes():
        lines = (RECIPES / f"{name}.yaml").read_text().splitlines()
        command = name not in whole or lines[1:2] == [f"# tastemaker train {name}"]
        if not (lines[0].startswith("# ") and lines[0].endswith(".") and command):
            wrong.append(name)
    assert not wrong
