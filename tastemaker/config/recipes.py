"""Find the recipes of the package by name.

Complete recipes are in one folder per family (`playground/`, `images/`, `video/`, ...) and are called by the name of
their file. Parts that other recipes extend are in `base/` and are called by their path in it: `models/flux`.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

RECIPES = Path(__file__).parent.parent / "recipes"
PARTS = RECIPES / "base"


@cache
def recipe_paths() -> dict[str, Path]:
    """Map the name of every recipe to its file, in alphabetical order. Reads the folders once, but no file."""
    paths: dict[str, Path] = {}
    for path in RECIPES.rglob("*.yaml"):
        name = path.relative_to(PARTS).with_suffix("").as_posix() if PARTS in path.parents else path.stem
        if name in paths:
            raise ValueError(f"two recipes are called '{name}': {paths[name]} and {path}")
        paths[name] = path
    return dict(sorted(paths.items()))


def list_recipes() -> list[str]:
    """List the names of all recipes in the package, including the parts that others extend."""
    return list(recipe_paths())


def list_trainable_recipes() -> list[str]:
    """List the names of the complete recipes, those that `tastemaker train` can run."""
    return [name for name, path in recipe_paths().items() if PARTS not in path.parents]
