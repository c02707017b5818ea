"""Randomly mutated configurations, overrides and YAML are valid or raise ConfigError, nothing else."""

import copy
import random
import time
from typing import Any

import pytest

from tastemaker.config.check import find_problems
from tastemaker.config.dump import config_to_dict
from tastemaker.config.load import RECIPES, apply_overrides, list_generator_recipes, read_recipe
from tastemaker.config.step_counts import compute_step_counts
from tastemaker.config.validate import validate_config
from tastemaker.config.yaml_io import parse_yaml, render_yaml
from tastemaker.core.registry import ConfigError

NUMBERS = (0, -1, 1, 2, 3, 10**12, -(10**12), 2**63, 10**400, 0.0, -0.5, 0.5, 1e-300, 1e308, float("nan"), float("inf"))
TEXTS = (
    "",
    " ",
    "grpo",
    "ode",
    "3e-4",
    "nan",
    "1e999",
    "much",
    "null",
    "a:b",
    ":",
    "os:path",
    "json:JSONDecoder",
    ".x:y",
)
STRANGE_TEXTS = (
    "\0",
    "\ud800",
    "é" * 50,
    "{}",
    "{prompt}",
    "{0}",
    "{prompt.x}",
    "../..",
    "a/b",
    "x" * 5000,
    "%s",
    b"\xff",
)
JUNK: tuple[Any, ...] = (
    None,
    True,
    False,
    [],
    {},
    [[]],
    [None],
    {"type": None},
    {"type": []},
    {"type": "toy_flow"},
    {1: 2},
    {None: {}},
)
TYPES = (
    "gaussian",
    "masked",
    "rectified_flow",
    "ddim",
    "cps",
    "grpo",
    "dpo",
    "jpeg",
    "clipped",
    "stillness",
    "lora",
    "prompts",
)


def paths(data: Any, prefix: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The paths of all entries in a tree of mappings and lists."""
    inner = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    own_path = [prefix] if prefix else []
    return own_path + [path for key, child in inner for path in paths(child, (*prefix, key))]


def random_value(rng: random.Random, depth: int = 0) -> Any:
    """A random value that no sensible configuration contains."""
    kind = rng.randrange(6 if depth < 4 else 4)
    if kind == 4:
        return {
            rng.choice((*TYPES, *TEXTS, "type", "of", 7, None)): random_value(rng, depth + 1)
            for _ in range(rng.randrange(4))
        }
    if kind == 5:
        return [random_value(rng, depth + 1) for _ in range(rng.randrange(4))]
    return copy.deepcopy(rng.choice((NUMBERS, TEXTS, STRANGE_TEXTS, JUNK)[kind]))


def get_at(data: Any, path: tuple[Any, ...]) -> Any:
    for step in path:
        data = data[step]
    return data


def perturb(rng: random.Random, old: Any) -> Any:
    """Another value of the same type, so that rules beyond the type check are reached."""
    if isinstance(old, bool):
        return not old
    if isinstance(old, (int, float)):
        return rng.choice([number for number in NUMBERS if type(number) is type(old)] + [old + 1, old * 2, -old])
    return rng.choice((*TYPES, *TEXTS)) if isinstance(old, str) else old


def mutate(rng: random.Random, data: dict[str, Any], other: dict[str, Any]) -> None:
    """Change one random entry, or replace it by a part of another configuration."""
    candidates = paths(data)
    if not candidates:
        return
    *parents, key = rng.choice(candidates)
    parent = get_at(data, tuple(parents))
    change = rng.choice(("drop", "rename", "replace", "retype", "add", "wrap", *["perturb"] * 6, *["graft"] * 3))
    if change == "drop":
        del parent[key]
    elif change == "rename" and isinstance(parent, dict):
        parent[rng.choice((str(key)[:-1], f"{key}s", 5, None, True, "type"))] = parent.pop(key)
    elif change == "retype" and isinstance(parent[key], dict):
        parent[key]["type"] = rng.choice((*TYPES, *TEXTS, None, 3))
    elif change == "add" and isinstance(parent[key], dict):
        parent[key][rng.choice((*TEXTS, "weight", "of", "steps", "window", 9))] = random_value(rng)
    elif change == "perturb":
        parent[key] = perturb(rng, parent[key])
    elif change == "graft":
        matches = [path for path in paths(other) if path[-1] == key]
        parent[key] = copy.deepcopy(get_at(other, rng.choice(matches or paths(other))))
    elif change == "wrap":
        parent[key] = rng.choice(
            ([parent[key]], {"type": "clipped", "reward": parent[key], "min": 0}, {"of": parent[key]})
        )
    else:
        parent[key] = random_value(rng)


def validate_or_refuse(data: object) -> str:
    """Return "valid" or "refused" (with readable messages); any other error is raised."""
    try:
        config = validate_config(data)
    except ConfigError as error:
        lines = str(error).splitlines()
        assert lines and all(": " in line and len(line) < 2000 for line in lines), lines
        return "refused"
    assert all(": " in line for line in find_problems(config, world_size=2))
    compute_step_counts(config)
    assert validate_config(config_to_dict(config)) == config
    return "valid"


@pytest.mark.parametrize("count", [1000, pytest.param(10_000, marks=pytest.mark.long)])
def test_mutated_configs_validate_or_raise_config_error(count: int) -> None:
    short = [read_recipe(name) for name in list_generator_recipes()]
    recipes = short + [config_to_dict(validate_config(data)) for data in short]  # with all defaults
    rng, counts, start = random.Random(20), {"valid": 0, "refused": 0}, time.process_time()
    for i in range(count):
        data, other = copy.deepcopy(rng.choice(recipes)), rng.choice(recipes)
        for _ in range(rng.choice((1, 1, 1, 2, 3, 6))):
            mutate(rng, data, other)
        try:
            counts[validate_or_refuse(data)] += 1
        except Exception as error:
            raise AssertionError(f"configuration {i} raised {error!r}: {data!r:.2000}") from error
    assert min(counts.values()) > count // 10, counts  # the mutations are neither too strong nor too weak
    assert time.process_time() - start < 90


def test_mutated_yaml_parses_or_raises_config_error() -> None:
    rng = random.Random(0)
    texts = [path.read_text() for path in sorted(RECIPES.rglob("*.yaml"))]
    for _ in range(600):
        text = list(rng.choice(texts))
        for _ in range(rng.choice((1, 2, 5))):
            position = rng.randrange(len(text))
            text[position : position + rng.randrange(3)] = rng.choice(
                ("", ":", "{", "[", "\t", "\n", "&a ", "*a", "!!set ", "\0", "'", "- ")
            )
        try:
            parse_yaml("".join(text), "recipe")
        except ConfigError as error:
            assert str(error).startswith("recipe")


def test_mutated_overrides_apply_or_raise_config_error() -> None:
    rng = random.Random(7)
    data = read_recipe("grpo-toy-flow")
    keys = ("optim", "lr", "objective", "type", "rewards", "color", "", "steps", "x", "0", "\0")
    values = (
        "3",
        "3e-4",
        "[",
        "{a: 1}",
        "null",
        "*a",
        "2001-99-99",
        "!!python/object:os.system x",
        "grpo",
        "",
        "1" * 5000,
    )
    for _ in range(1000):
        assignment = ".".join(rng.choice(keys) for _ in range(rng.randrange(1, 4))) + rng.choice(
            ("=", "=", "=", "", "==")
        )
        try:
            validate_or_refuse(apply_overrides(data, [assignment + rng.choice(values)]))
        except ConfigError:
            continue


def test_yaml_round_trips() -> None:
    for text in (
        "1e5",
        "3e-4",
        "on",
        "null",
        "a: b",
        "é",
        "- x",
        "1_000",
        "0x10",
        "2001-01-01",
        " padded ",
        "multi\nline",
    ):
        assert parse_yaml(render_yaml({"text": text, "number": 1e-5}), "x") == {"text": text, "number": 1e-5}
