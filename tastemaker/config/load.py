"""Load recipes: YAML files merged over the files they extend, with `key=value` overrides on top."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

from ..core.registry import ConfigError
from .recipes import CONFIG_FILE as CONFIG_FILE
from .recipes import RECIPES as RECIPES
from .recipes import YAML_SUFFIXES as YAML_SUFFIXES
from .recipes import disable_null_sections, recipe_paths
from .recipes import find_recipe as find_recipe
from .recipes import list_recipes as list_recipes
from .recipes import list_trainable_recipes as list_trainable_recipes
from .recipes import merge_mappings as merge_mappings
from .recipes import merge_parents as merge_parents
from .recipes import read_yaml_mapping as read_yaml_mapping
from .registries import MODELS, OBJECTIVES, PROCESSES, TUNINGS, convert_config
from .schema import AnyConfig, JudgeRunConfig, PreferenceRunConfig, RunConfig
from .validate import validate_config
from .yaml_io import parse_yaml

RUN_KINDS = {"objective", "autoencoder", "judge", "preference"}  # every complete recipe has one of these sections

# Sections whose settings a class of your own takes over, as far as it has them.
CUSTOMIZABLE_SECTIONS = {"objective": OBJECTIVES, "model": MODELS, "process": PROCESSES, "tuning": TUNINGS}


def load(recipe: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Load the configuration of a recipe that trains a generator."""
    config = load_any_config(recipe, overrides)
    if not isinstance(config, RunConfig):
        what = {JudgeRunConfig: "a judge", PreferenceRunConfig: "a preference model"}.get(
            type(config), "an autoencoder"
        )
        raise ConfigError(
            f"{recipe}: this recipe trains {what}, which cannot generate images; use the recipe with `tastemaker "
            "train`, or give the recipe of a generator [TM026]"
        )
    return config


def load_any_config(recipe: str | Path, overrides: Sequence[str] = ()) -> AnyConfig:
    """Load the configuration of any recipe. Its name is the recipe's, unless the recipe sets one."""
    data = read_recipe(recipe, overrides)
    if not RUN_KINDS & data.keys() and str(recipe) in recipe_paths().keys() - {*list_trainable_recipes()}:
        raise ConfigError(
            f"{recipe}: this is only a part of a recipe, for use in `extends`; "
            f"{_suggest_complete_recipe(str(recipe))} [TM027]"
        )
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
        raise ConfigError(
            f"{recipe}: the settings are nested too deeply; write sections with settings, such as optim: {{lr: 1e-4}} "
            "[TM028]"
        ) from error


def list_generator_recipes() -> list[str]:
    """List the recipes that train a generator, not an autoencoder or a judge."""
    return [
        name
        for name in list_trainable_recipes()
        if not {"autoencoder", "judge", "preference"} & _read_package(name).keys()
    ]


def list_judge_recipes() -> list[str]:
    """List the recipes that train a judge."""
    return [name for name in list_trainable_recipes() if "judge" in _read_package(name)]


def apply_overrides(data: dict[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """Apply `section.key=value` in order; values are YAML."""
    for override in overrides:
        place, equals, text = override.partition("=")
        keys = place.strip().split(".")
        if not equals or not all(keys):
            raise ConfigError(
                f"'{override:.60}' is not an override; write key=value, for example optim.lr=3e-4 [TM029]"
            )
        section: Any = data
        for depth, key in enumerate(keys[:-1]):
            section = section.get(key, {})
            if section is not None and not isinstance(section, dict):
                parent = ".".join(keys[: depth + 1])
                raise ConfigError(
                    f"{place}: '{parent}' is {section!r:.60} and has no keys below it; set '{parent}' itself [TM030]"
                )
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
        warnings.warn(
            f"{section}.type: {location} does not have these settings of the recipe, so they are dropped: "
            f"{named}; add fields of these names to your class to keep them [TM031]",
            stacklevel=2,
        )
    return {"type": location, **kept}


def _read_package(name: str) -> dict[str, Any]:
    return read_yaml_mapping(recipe_paths()[name])


def _suggest_complete_recipe(part: str) -> str:
    """Advice for a user who named a part: a recipe that extends it, if there is one."""
    recipe = next((name for name in list_trainable_recipes() if part in _ancestors(name)), None)
    if recipe is None:
        return f"write a recipe with `extends: [{part}]` and an objective"
    return f"use a complete recipe that extends it, for example {recipe}"


def _ancestors(name: str) -> list[str]:
    """All recipes of the package that a recipe extends, directly or not."""
    extends = _read_package(name).get("extends") or []
    parents: list[str] = [extends] if isinstance(extends, str) else extends
    return [each for parent in parents for each in (parent, *_ancestors(parent))]
