"""Load recipes: YAML files merged over the files they extend, with `key=value` overrides on top."""

from __future__ import annotations

import copy
import os
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from ..core.registry import ConfigError, suggest_name
from .recipes import RECIPES as RECIPES
from .recipes import list_recipes as list_recipes
from .recipes import list_trainable_recipes as list_trainable_recipes
from .recipes import recipe_paths
from .registries import MODELS, OBJECTIVES, PROCESSES, TUNINGS, convert_config
from .schema import AnyConfig, JudgeRunConfig, RunConfig
from .validate import validate_config
from .yaml_io import parse_yaml

YAML_SUFFIXES = (".yaml", ".yml")
CONFIG_FILE = "config.yaml"  # in the directory of a run
RUN_KINDS = {"objective", "autoencoder", "judge"}  # every complete recipe has one of these sections
# What null means for sections with a period: deleted, they would have their defaults instead.
DISABLED_SECTIONS = {"sample": {"every": 0}, "guard": {"every": 0}, "validation": {"every": 0}}

# Sections whose settings a class of your own takes over, as far as it has them.
CUSTOMIZABLE_SECTIONS = {"objective": OBJECTIVES, "model": MODELS, "process": PROCESSES, "tuning": TUNINGS}


def load(recipe: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Load the configuration of a recipe that trains a generator."""
    config = load_any_config(recipe, overrides)
    if not isinstance(config, RunConfig):
        what = "a judge" if isinstance(config, JudgeRunConfig) else "an autoencoder"
        raise ConfigError(
            f"{recipe}: this recipe trains {what}, which cannot generate images; use it with `tastemaker train`, "
            "or give the recipe of a generator"
        )
    return config


def load_any_config(recipe: str | Path, overrides: Sequence[str] = ()) -> AnyConfig:
    """Load the configuration of any recipe. Its name is the recipe's, unless the recipe sets one."""
    data = read_recipe(recipe, overrides)
    if not RUN_KINDS & data.keys() and str(recipe) in recipe_paths().keys() - {*list_trainable_recipes()}:
        raise ConfigError(f"{recipe} is only a part of a recipe; {_suggest_complete_recipe(str(recipe))}")
    config = validate_config(data)
    return config if config.name else replace(config, name=Path(recipe).stem)


def read_recipe(recipe: str | Path, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """Read a recipe as plain data: parents merged, other projects' formats converted, overrides applied."""
    try:
        data = merge_parents(find_recipe(str(recipe), Path()))
        data, remaining = convert_config(data, overrides)
        if parent := data.pop("extends", None):
            data = merge_mappings(merge_parents(find_recipe(parent, Path())), data)
        return apply_overrides(data, remaining)
    except RecursionError as error:
        raise ConfigError(f"{recipe}: nested too deeply; expected sections of settings") from error


def list_generator_recipes() -> list[str]:
    """List the recipes that train a generator, not an autoencoder or a judge."""
    return [name for name in list_trainable_recipes() if not {"autoencoder", "judge"} & _read_package(name).keys()]


def list_judge_recipes() -> list[str]:
    """List the recipes that train a judge."""
    return [name for name in list_trainable_recipes() if "judge" in _read_package(name)]


def find_recipe(name: str, folder: Path, where: str = "") -> Path:
    """Find the file of a recipe by its name, or by a path relative to the folder that ends in .yaml."""
    start = f"{where}: " if where else ""
    if name.endswith(YAML_SUFFIXES):
        path = folder / name
        if not os.path.isfile(path):  # unlike Path's, it accepts any name
            raise ConfigError(f"{start}there is no file {path!s:.300}; give the name of a recipe or a YAML file")
        return path
    if name not in recipe_paths():
        hint = f"the path of a file ends in .yaml, and the directory of a run has a {CONFIG_FILE}"
        raise ConfigError(f"{start}there is no recipe '{name:.60}'{suggest_name(name, list_recipes())}; {hint}")
    return recipe_paths()[name]


def read_yaml_mapping(path: Path) -> dict[str, Any]:
    """Read the mapping in one file, without its parents."""
    try:
        data = copy.deepcopy(_parse_cached(path.read_text(encoding="utf-8"), str(path)))
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: byte {error.start} is not UTF-8; save the file as UTF-8 text") from error
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror}); check the path and its permissions") from error
    if data is not None and not isinstance(data, dict):
        raise ConfigError(f"{path}: expected a mapping of sections, got a {type(data).__name__}")
    return data or {}


@lru_cache(maxsize=512)
def _parse_cached(text: str, where: str) -> Any:
    """Parse YAML once per text, since many recipes extend the same few; callers copy the result."""
    return parse_yaml(text, where)


def _read_package(name: str) -> dict[str, Any]:
    return read_yaml_mapping(recipe_paths()[name])


def merge_parents(path: Path, children: tuple[Path, ...] = ()) -> dict[str, Any]:
    """Merge a file over the files it extends; later parents override earlier ones."""
    path = path.resolve()
    if path in children:
        circle = " -> ".join(file.name for file in (*children[children.index(path) :], path))
        raise ConfigError(f"{path}: 'extends' is circular: {circle}; remove one of them")
    data = read_yaml_mapping(path)
    parents = data.pop("extends", None) or []
    parents = [parents] if isinstance(parents, str) else parents
    if not isinstance(parents, list) or not all(isinstance(parent, str) for parent in parents):
        raise ConfigError(f"{path}: 'extends' must be the name of a recipe, a path or a list of them")
    merged: dict[str, Any] = {}
    for parent in parents:
        merged = merge_mappings(merged, merge_parents(_find_parent(parent, path), (*children, path)))
    merged.pop("name", None)  # of another run
    return merge_mappings(merged, disable_null_sections(data))


def _find_parent(name: str, path: Path) -> Path:
    """Find a parent of a file: for a user's file first in its folder, then in the package; or the config of a run."""
    sibling, in_package = path.parent / f"{name}{YAML_SUFFIXES[0]}", name in recipe_paths()
    runs = () if in_package else (path.parent / name / CONFIG_FILE, Path(name) / CONFIG_FILE)
    candidates = () if RECIPES in path.parents else (sibling, *runs)
    return next(
        (each for each in candidates if each != path and os.path.isfile(each)),
        None,
    ) or find_recipe(name, path.parent, str(path))


def merge_mappings(base: Mapping[str, Any], top: Mapping[str, Any]) -> dict[str, Any]:
    """Merge `top` over `base` recursively. null removes a mapping; a mapping of another `type` replaces it."""
    merged = dict(base)
    for key, value in top.items():
        old = merged.get(key)
        if isinstance(old, dict) and value is None:
            del merged[key]
        # The keys of another type would be settings of a component that is no longer there.
        elif (
            isinstance(old, dict) and isinstance(value, dict) and value.get("type", old.get("type")) == old.get("type")
        ):
            merged[key] = merge_mappings(old, value)
        else:
            merged[key] = value
    return merged


def disable_null_sections(sections: Mapping[str, Any]) -> dict[str, Any]:
    """Replace null by `every: 0` for sections with a period."""
    return {key: DISABLED_SECTIONS.get(key) if value is None else value for key, value in sections.items()}


def apply_overrides(data: dict[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """Apply `section.key=value` in order; values are YAML."""
    for override in overrides:
        place, equals, text = override.partition("=")
        keys = place.strip().split(".")
        if not equals or not all(keys):
            raise ConfigError(f"'{override:.60}' is not an override; expected key=value, for example optim.lr=3e-4")
        section: Any = data
        for depth, key in enumerate(keys[:-1]):
            section = section.get(key, {})
            if section is not None and not isinstance(section, dict):
                parent = ".".join(keys[: depth + 1])
                raise ConfigError(f"{place}: '{parent}' is {section!r:.60}, which has no keys; set '{parent}' itself")
            section = section or {}
        patch = parse_yaml(text, place)
        if keys[1:] == ["type"] and isinstance(patch, str) and ":" in patch:
            patch, keys = keep_shared_settings(keys[0], data.get(keys[0]), patch), keys[:1]
        for key in reversed(keys):
            patch = {key: patch}
        data = merge_mappings(data, disable_null_sections(patch))
    return data


def keep_shared_settings(section: str, settings: Any, location: str) -> dict[str, Any]:
    """Return a section with your own class "module:Class" as its type, and the settings that this class also has.

    A subclass keeps all settings of the recipe; a warning names those that another class does not have.
    """
    registry = CUSTOMIZABLE_SECTIONS.get(section)
    if registry is None or not isinstance(settings, Mapping):
        return {"type": location}
    cls = registry.find(location, section)
    known = {field.name for field in fields(cls)} if is_dataclass(cls) else set()
    kept = {key: value for key, value in settings.items() if key in known}
    dropped = sorted(set(settings) - set(kept) - {"type"})
    if dropped:
        named = ", ".join(f"{section}.{key}={settings[key]}" for key in dropped)
        warnings.warn(f"{section}.type: {location} has no such settings, so these are dropped: {named}", stacklevel=2)
    return {"type": location, **kept}


def _suggest_complete_recipe(part: str) -> str:
    """Advice for a user who named a part: a recipe that extends it, if there is one."""
    recipe = next((name for name in list_trainable_recipes() if part in _ancestors(name)), None)
    if recipe is None:
        return f"write a recipe with `extends: [{part}]` and an objective"
    return f"name a recipe that extends it, for example {recipe}"


def _ancestors(name: str) -> list[str]:
    """All recipes of the package that a recipe extends, directly or not."""
    extends = _read_package(name).get("extends") or []
    parents: list[str] = [extends] if isinstance(extends, str) else extends
    return [each for parent in parents for each in (parent, *_ancestors(parent))]
