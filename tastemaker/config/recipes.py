"""The recipes in the package, by name; which of them exist is known without reading any."""

from __future__ import annotations

from functools import cache
from pathlib import Path

RECIPES = Path(__file__).parent.parent / "recipes"


@cache
def recipe_names() -> dict[str, None]:
    """The names of all recipes in order, read from the disk once: the package does not change while it runs."""
    return dict.fromkeys(sorted(str(path.relative_to(RECIPES).with_suffix("")) for path in RECIPES.rglob("*.yaml")))


def list_recipes() -> list[str]:
    """The names of all recipes in the package, those that others extend included."""
    return list(recipe_names())


def list_trainable_recipes() -> list[str]:
    """The names of those recipes that are whole runs."""
    return [name for name in list_recipes() if "/" not in name and name != "base"]
