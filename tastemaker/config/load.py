"""Recipes: YAML laid over the YAML it extends, with `key=value` laid over that."""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from ..compat.nanovla import convert_nanovla_config, is_two_stage_config
from ..core.registry import ConfigError, suggest_name
from .recipes import RECIPES as RECIPES
from .recipes import list_recipes as list_recipes
from .recipes import list_trainable_recipes as list_trainable_recipes
from .recipes import recipe_names
from .schema import AnyConfig, JudgeRunConfig, RunConfig
from .validate import validate_config
from .yaml_io import parse_yaml

SUFFIXES = (".yaml", ".yml")
CONFIG = "config.yaml"  # in the folder of a run
RUN_KINDS = {"objective", "autoencoder", "judge"}  # of which every whole run has one
DISABLED_SECTIONS = {
    "sample": {"every": 0},
    "guard": {"every": 0},
    "validation": {"every": 0},
}  # what these sections are as null


def generator_recipes() -> list[str]:
    """Those of them that train a generator, and so can generate; the others train an autoencoder or a judge."""
    return [
        name
        for name in list_trainable_recipes()
        if not {"autoencoder", "judge"} & read_yaml_mapping(RECIPES / f"{name}.yaml").keys()
    ]


def judge_recipes() -> list[str]:
    """Those of them that train a judge."""
    return [name for name in list_trainable_recipes() if "judge" in read_yaml_mapping(RECIPES / f"{name}.yaml")]


def find_recipe(name: str, folder: Path, where: str = "") -> Path:
    """The file behind a recipe's name, or behind a path that ends in .yaml and begins at the folder."""
    start = f"{where}: " if where else ""
    if name.endswith(SUFFIXES):
        path = folder / name
        if not os.path.isfile(path):  # unlike Path's, it takes any name
            raise ConfigError(f"{start}there is no file {path!s:.300}; give a recipe's name or the path of a YAML file")
        return path
    if name not in recipe_names():
        others = f"a file's path ends in .yaml, and a run's folder holds {CONFIG}"
        raise ConfigError(f"{start}no recipe is called '{name:.60}'{suggest_name(name, list_recipes())}; {others}")
    return RECIPES / f"{name}.yaml"


def read_yaml_mapping(path: Path) -> dict[str, Any]:
    """The mapping in one file, by itself."""
    try:
        data = copy.deepcopy(_parsed(path.read_text(encoding="utf-8"), str(path)))
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: byte {error.start} is not UTF-8; save the file as UTF-8 text") from error
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror}); check the path and its permissions") from error
    if data is not None and not isinstance(data, dict):
        raise ConfigError(f"{path}: expected a mapping of sections, found a {type(data).__name__}")
    return data or {}


@lru_cache(maxsize=512)
def _parsed(text: str, where: str) -> Any:
    """What YAML says, parsed once per text: many recipes extend the same few. Callers copy it before they change it."""
    return parse_yaml(text, where)


def merge_extends(path: Path, above: tuple[Path, ...] = ()) -> dict[str, Any]:
    """A file laid over those it extends, the later of them over the earlier."""
    path = path.resolve()
    if path in above:
        circle = " -> ".join(file.name for file in (*above[above.index(path) :], path))
        raise ConfigError(f"{path}: 'extends' goes in a circle: {circle}; remove one of them")
    own = read_yaml_mapping(path)
    parents = own.pop("extends", None) or []
    parents = [parents] if isinstance(parents, str) else parents
    if not isinstance(parents, list) or not all(isinstance(parent, str) for parent in parents):
        raise ConfigError(f"{path}: 'extends' must be a recipe's name, a path or a list of them")
    merged: dict[str, Any] = {}
    for parent in parents:
        merged = merge_mappings(merged, merge_extends(_extended(parent, path), (*above, path)))
    merged.pop("name", None)  # which is of one run, and this is another
    return merge_mappings(merged, apply_disabled_sections(own))


def _extended(name: str, path: Path) -> Path:
    """What a file extends: of that name beside a file of the user's own, or else in the package; or a run."""
    beside, known = path.parent / f"{name}{SUFFIXES[0]}", name in recipe_names()
    runs = () if known else (path.parent / name / CONFIG, Path(name) / CONFIG)
    own = [each for each in (beside, *runs) if RECIPES not in path.parents and each != path and os.path.isfile(each)]
    return own[0] if own else find_recipe(name, path.parent, str(path))


def merge_mappings(base: Mapping[str, Any], top: Mapping[str, Any]) -> dict[str, Any]:
    """Mappings merge, unless their `type` differs; nothing over a mapping removes it; all else is replaced."""
    merged = dict(base)
    for key, value in top.items():
        old = merged.get(key)
        if isinstance(old, dict) and value is None:
            del merged[key]
        # With another type the old keys would be settings of a thing that is no longer there.
        elif (
            isinstance(old, dict) and isinstance(value, dict) and value.get("type", old.get("type")) == old.get("type")
        ):
            merged[key] = merge_mappings(old, value)
        else:
            merged[key] = value
    return merged


def apply_disabled_sections(sections: Mapping[str, Any]) -> dict[str, Any]:
    """The same sections, off where there is nothing in place of one that happens every so many steps."""
    # Taken away, they would be what they are by default, which may be more than what was there.
    return {key: DISABLED_SECTIONS.get(key) if value is None else value for key, value in sections.items()}


def apply_overrides(data: dict[str, Any], assignments: Sequence[str]) -> dict[str, Any]:
    """Apply `section.key=value` in turn, each value read as YAML."""
    for assignment in assignments:
        place, equals, text = assignment.partition("=")
        keys = place.strip().split(".")
        if not equals or not all(keys):
            raise ConfigError(f"'{assignment:.60}' is no override; expected key=value, as in optim.lr=3e-4")
        inside: Any = data
        for depth, key in enumerate(keys[:-1]):
            inside = inside.get(key, {})
            if inside is not None and not isinstance(inside, dict):
                parent = ".".join(keys[: depth + 1])
                raise ConfigError(
                    f"{place}: '{parent}' is {inside!r:.60}, which has no keys below it; set '{parent}' itself"
                )
            inside = inside or {}
        patch = parse_yaml(text, place)
        for key in reversed(keys):
            patch = {key: patch}
        data = merge_mappings(data, apply_disabled_sections(patch))
    return data


def read_recipe(recipe: str | Path, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """A recipe as plain data: what it extends merged in, overrides applied, nothing validated."""
    try:
        data = merge_extends(find_recipe(str(recipe), Path()))
        # Of a file that says two stages, which one is meant decides what all other settings are laid over.
        first = [each for each in overrides if each.startswith("stage=") and is_two_stage_config(data)]
        found = convert_nanovla_config(apply_overrides(data, first))
        if parent := found.pop("extends", None):
            found = merge_mappings(merge_extends(find_recipe(parent, Path())), found)
        return apply_overrides(found, [each for each in overrides if each not in first])
    except RecursionError as error:
        raise ConfigError(f"{recipe}: nested too deeply; expected sections of settings") from error


def load_any_config(recipe: str | Path, overrides: Sequence[str] = ()) -> AnyConfig:
    """The configuration a recipe describes; a run without a name takes the recipe's."""
    data = read_recipe(recipe, overrides)
    if not RUN_KINDS & data.keys() and str(recipe) in recipe_names().keys() - {*list_trainable_recipes()}:
        raise ConfigError(f"{recipe} describes a part of a run alone; {_whole(str(recipe))}")
    config = validate_config(data)
    return config if config.name else replace(config, name=Path(recipe).stem)


def _whole(part: str) -> str:
    """Where to find a recipe that has that part and all others."""
    found = next((name for name in list_trainable_recipes() if part in _above(name)), None)
    own = f"write a recipe of your own with `extends: [{part}]` and an objective"
    return own if found is None else f"name a recipe that extends it, for example {found}"


def _above(name: str) -> list[str]:
    """All that a recipe of the package extends, at any remove."""
    told = read_yaml_mapping(RECIPES / f"{name}{SUFFIXES[0]}").get("extends") or []
    parents: list[str] = [told] if isinstance(told, str) else told
    return [each for parent in parents for each in (parent, *_above(parent))]


def load(recipe: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Load the configuration of a recipe that trains a generator."""
    config = load_any_config(recipe, overrides)
    if not isinstance(config, RunConfig):
        what = "a judge" if isinstance(config, JudgeRunConfig) else "an autoencoder"
        raise ConfigError(
            f"{recipe}: it trains {what}, which alone makes no pictures; use it with `tastemaker train`, "
            "or give the recipe of a generator"
        )
    return config
