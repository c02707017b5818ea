"""The recipes in the package, by name; which of them exist is known without reading any."""

from __future__ import annotations

from pathlib import Path

RECIPES = Path(__file__).parent.parent / "recipes"


def recipes() -> list[str]:
    """The names of all recipes in the package, those that others extend included."""
    return sorted(str(path.relative_to(RECIPES).with_suffix("")) for path in RECIPES.rglob("*.yaml"))


def trainable() -> list[str]:
    """The names of those recipes that are whole runs."""
    return [name for name in recipes() if "/" not in name and name != "base"]
