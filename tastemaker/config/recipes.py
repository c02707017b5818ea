"""Find recipes by name, read their files and merge each over the files it extends. Imports no torch.

Complete recipes are in one folder per family (`playground/`, `images/`, `video/`, ...) and are called by the name of
their file. Parts that other recipes extend are in `base/` and are called by their path in it: `models/flux`.
"""

from __future__ import annotations

import copy
import difflib
import os
import re
from collections.abc import Mapping
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

from ..core.registry import ConfigError
from ..core.safe_files import MAX_YAML_BYTES, parse_yaml_mapping, read_text

RECIPES = Path(__file__).parent.parent / "recipes"
PARTS = RECIPES / "base"
YAML_SUFFIXES = (".yaml", ".yml")
CONFIG_FILE = "config.yaml"  # in the directory of a run
MAX_SUGGESTIONS = 5  # recipes named in a message about an unknown one
# What null means for sections with a period: deleted, they would have their defaults instead.
DISABLED_SECTIONS = {"sample": {"every": 0}, "guard": {"every": 0}, "validation": {"every": 0}}


@cache
def recipe_paths() -> dict[str, Path]:
    """Map the name of every recipe to its file, in alphabetical order. Reads the folders once, but no file."""
    paths: dict[str, Path] = {}
    for path in RECIPES.rglob("*.yaml"):
        name = path.relative_to(PARTS).with_suffix("").as_posix() if PARTS in path.parents else path.stem
        if name in paths:
            raise ValueError(
                f"two recipes have the name '{name}': {paths[name]} and {path}; rename one of the two files [TM038]"
            )
        paths[name] = path
    return dict(sorted(paths.items()))


def list_recipes() -> list[str]:
    """List the names of all recipes in the package, including the parts that others extend."""
    return list(recipe_paths())


def list_trainable_recipes() -> list[str]:
    """List the names of the complete recipes, those that `tastemaker train` can run."""
    return [name for name, path in recipe_paths().items() if PARTS not in path.parents]


def find_recipe(name: str, folder: Path, where: str = "") -> Path:
    """Find the file of a recipe by its name, or by a path relative to the folder that ends in .yaml."""
    start = f"{where}: " if where else ""
    if name.endswith(YAML_SUFFIXES):
        path = folder / name
        if not os.path.isfile(path):  # unlike Path's, it accepts any name
            raise ConfigError(
                f"{start}the file {path!s:.300} does not exist; give the name of a recipe, or the path of an "
                "existing YAML file [TM039]"
            )
        return path
    if name not in recipe_paths():
        raise ConfigError(f"{start}{_describe_unknown(name, is_parent=bool(where))} [TM040]")
    return recipe_paths()[name]


def _describe_unknown(name: str, *, is_parent: bool) -> str:
    """Explain a name that is no recipe. A path or a directory is meant as a run, for which no recipe is suggested."""
    unknown = f"unknown recipe '{name:.60}'"
    if is_parent:
        hint = f"give a recipe name, a path that ends in .yaml, or a run directory with a {CONFIG_FILE}"
        return f"{unknown}{suggest_recipes(name, list_recipes())}; {hint}"
    if os.path.isdir(name):
        return f"{name:.300} is not a run directory: {CONFIG_FILE} is missing; give a run directory or a recipe name"
    if any(name.startswith(f"{path.name}/") for path in PARTS.iterdir() if path.is_dir()):
        return f"{unknown}{suggest_recipes(name, [part for part in list_recipes() if '/' in part])}"
    if "/" in name:
        return f"the run directory {name:.300} does not exist; correct the path, or give a recipe name"
    hint = "see all recipes with `tastemaker list recipes`, or give a path that ends in .yaml"
    return f"{unknown}{suggest_recipes(name, list_trainable_recipes())}; {hint}"


def suggest_recipes(name: str, known: list[str]) -> str:
    """The end of a message about an unknown recipe: the one that is misspelled, or the five most similar ones.

    Similar are recipes that contain the words of the name, such as the method and the model, in any order.
    """
    if similar := difflib.get_close_matches(name.lower(), known, 1, cutoff=0.75):
        return f"; did you mean '{similar[0]}'?"
    words = {word for word in re.split(r"[^a-z0-9]+", name.lower()) if word}

    def similarity(recipe: str) -> tuple[int, float]:
        return sum(word in recipe for word in words), difflib.SequenceMatcher(None, name.lower(), recipe).ratio()

    nearest = sorted(known, key=similarity, reverse=True)[:MAX_SUGGESTIONS]
    return f"; the nearest are {', '.join(nearest)}"


def read_yaml_mapping(path: Path) -> dict[str, Any]:
    """Read the mapping in one file, without its parents."""
    return copy.deepcopy(_parse_cached(read_text(path, MAX_YAML_BYTES), str(path)))


@lru_cache(maxsize=512)
def _parse_cached(text: str, where: str) -> dict[str, Any]:
    """Parse YAML once per text, since many recipes extend the same few; callers copy the result."""
    return parse_yaml_mapping(text, where)


def merge_parents(path: Path, children: tuple[Path, ...] = ()) -> dict[str, Any]:
    """Merge a file over the files it extends; later parents override earlier ones."""
    path = path.resolve()
    if path in children:
        circle = " -> ".join(file.name for file in (*children[children.index(path) :], path))
        raise ConfigError(f"{path}: 'extends' is circular: {circle}; remove one of these 'extends' [TM044]")
    data = read_yaml_mapping(path)
    parents = data.pop("extends", None) or []
    parents = [parents] if isinstance(parents, str) else parents
    if not isinstance(parents, list) or not all(isinstance(parent, str) for parent in parents):
        raise ConfigError(
            f"{path}: 'extends' is not the name of a recipe, a path or a list of these; write for example extends: "
            "models/flux [TM045]"
        )
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
