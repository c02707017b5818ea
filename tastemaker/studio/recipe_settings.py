"""How the configuration of a run differs from the recipe that it came from.

A run writes all settings with their defaults. The same settings of a recipe are computed in another process, because
this needs torch, which would take more memory than the rest of the studio.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from ..config.recipes import find_recipe, list_trainable_recipes, merge_parents
from ..config.settings_diff import IGNORED_KEYS, flatten_settings
from ..core.errors import ConfigError
from ..core.registry import USER_CODE_VARIABLE, subprocess_path

TIMEOUT_SECONDS = 180.0
MAX_CHANGES = 200
KINDS = ("objective", "model", "autoencoder", "judge")  # sections by whose type a recipe is recognized
PROGRAM = """
import json, sys
from tastemaker.config.dump import config_to_dict
from tastemaker.config.load import load_any_config
json.dump(config_to_dict(load_any_config(sys.argv[1])), sys.stdout, default=str)
"""


@dataclass(frozen=True)
class SettingChange:
    """A setting of a run that differs from the recipe."""

    name: str
    recipe: str
    run: str


@dataclass(frozen=True)
class RecipeDifference:
    """The recipe that a run came from, and the settings that differ."""

    recipe: str  # empty if none is similar
    is_named: bool  # whether the run has the name of the recipe; otherwise it is the most similar one
    changes: tuple[SettingChange, ...]


class RecipeSettings:
    """Complete settings of recipes, each computed once."""

    def __init__(self) -> None:
        self._settings: dict[str, Mapping[str, Any]] = {}
        self._lock = threading.Lock()

    def compare(self, config: Mapping[str, Any]) -> RecipeDifference:
        """Compare the configuration of a run with its recipe. Takes some seconds the first time."""
        name = str(config.get("name", ""))
        is_named = name in list_trainable_recipes()
        recipe = name if is_named else find_similar_recipe(config)
        if not recipe:
            return RecipeDifference("", False, ())
        with self._lock:
            if recipe not in self._settings:
                self._settings[recipe] = compute_settings(recipe)
        return RecipeDifference(recipe, is_named, tuple(find_changes(self._settings[recipe], config)))


def compute_settings(recipe: str) -> Mapping[str, Any]:
    """Return all settings of a recipe of the package."""
    process = subprocess.run(
        [sys.executable, "-P", "-c", PROGRAM, recipe],
        env={**os.environ, "PYTHONPATH": subprocess_path(), USER_CODE_VARIABLE: "refuse"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=TIMEOUT_SECONDS,
        check=False,
    )
    if process.returncode:
        reason = process.stderr.decode("utf-8", "replace").strip().splitlines()[-1:]
        raise ConfigError(f"the recipe {recipe} cannot be read ({reason}); reinstall tastemaker [TM1377]")
    settings: dict[str, Any] = json.loads(process.stdout)
    return settings


def find_changes(recipe: Mapping[str, Any], run: Mapping[str, Any]) -> list[SettingChange]:
    """Return the settings that differ, by name."""
    before, after = (flatten_settings(json.loads(json.dumps(each, default=str))) for each in (recipe, run))
    names = [name for name in sorted(before | after) if name not in IGNORED_KEYS]
    changes = [
        SettingChange(name, str(before.get(name, "absent")), str(after.get(name, "absent")))
        for name in names
        if before.get(name) != after.get(name)
    ]
    return changes[:MAX_CHANGES]


def find_similar_recipe(config: Mapping[str, Any]) -> str:
    """Return the recipe with the same types that has most settings in common; empty if there is none."""
    settings = flatten_settings(config)
    best, best_share = "", 0.0
    for recipe in list_trainable_recipes():
        explicit = read_explicit_settings(recipe)
        if any(explicit.get(f"{kind}.type", "") not in ("", settings.get(f"{kind}.type")) for kind in KINDS):
            continue
        if not any(f"{kind}.type" in explicit for kind in KINDS):
            continue
        share = sum(settings.get(name) == value for name, value in explicit.items()) / len(explicit)
        if share > best_share:
            best, best_share = recipe, share
    return best


@cache
def read_explicit_settings(recipe: str) -> Mapping[str, Any]:
    """Return the settings that a recipe and its parents write, without defaults."""
    try:
        return flatten_settings(merge_parents(find_recipe(recipe, Path())))
    except ConfigError:
        return {}
