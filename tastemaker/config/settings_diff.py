"""Differences between two configurations as plain data, setting by setting. Imports no torch."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

# May differ in a resumed run.
IGNORED_KEYS = ("output_dir", "name", "data.max_skipped", "engine.device", "engine.overlap_rewards")
IGNORED_PATTERN = re.compile(r"rewards\.[^.]+\.(.+\.)?budget(\..+)?")  # what may be spent, which is raised to go on
MAX_VALUE_LENGTH = 60  # characters of a value in a message


def flatten_settings(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested settings by dotted name."""
    settings: dict[str, Any] = {}
    for key, value in tree.items():
        name = f"{prefix}{key}"
        settings.update(flatten_settings(value, f"{name}.") if isinstance(value, Mapping) and value else {name: value})
    return settings


def diff_settings(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, str]:
    """Return the settings that differ by dotted name, as "old -> new"."""
    before, after = flatten_settings(old), flatten_settings(new)
    names = [
        name for name in sorted(before | after) if name not in IGNORED_KEYS and not IGNORED_PATTERN.fullmatch(name)
    ]
    return {
        name: f"{_shorten(before.get(name, 'absent'))} -> {_shorten(after.get(name, 'absent'))}"
        for name in names
        if before.get(name) != after.get(name)
    }


def _shorten(value: object) -> str:
    text = str(value)
    return text if len(text) <= MAX_VALUE_LENGTH else f"{text[: MAX_VALUE_LENGTH - 3]}..."
