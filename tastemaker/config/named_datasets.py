"""Datasets by name from a file of your own: `data: {type: named, name: faces}` uses the entry `faces`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..core.registry import ConfigError, suggest_name
from ..core.safe_files import MAX_YAML_BYTES, parse_yaml, read_text
from .registries import convert_dataset

NAMED_DATASET = "named"
DATASETS_FILES = (Path("datasets.yaml"), Path("configs/datasets.yaml"))  # the first one that exists


def resolve_named_dataset(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Replace `type: named` by the settings of its entry, with further keys on top; return others unchanged."""
    if settings.get("type") != NAMED_DATASET:
        return dict(settings)
    file, name = find_datasets_file(settings.get("file")), settings.get("name")
    entries = read_datasets_file(file)
    if not isinstance(name, str) or name not in entries:
        problem = f"has no dataset '{name:.60}'" if isinstance(name, str) else "needs a `name` to look up"
        raise ConfigError(f"data.name: {file} {problem}{suggest_name(str(name), entries)} [TM032]")
    entry = entries[name]
    kind = entry.get("type") if isinstance(entry, Mapping) else None
    if not isinstance(kind, str) or kind == NAMED_DATASET:
        problem = f"has the type {kind!r:.40}" if isinstance(entry, Mapping) else f"is {entry!r:.60}"
        raise ConfigError(
            f"{file}: the dataset '{name:.60}' {problem}; write settings such as {{type: image_collection, path: "
            "faces} [TM033]"
        )
    overrides = {key: value for key, value in settings.items() if key not in ("type", "name", "file")}
    return {**convert_dataset(entry, f"{file}: {name}"), **overrides}


def find_datasets_file(file: object) -> Path:
    """Return the given file, or the first default one that exists."""
    if file is not None and not isinstance(file, str | Path):
        raise ConfigError(
            f"data.file: expected the path of a YAML file with named datasets, got {file!r:.60}; correct data.file "
            "[TM034]"
        )
    candidates = (Path(file),) if file is not None else DATASETS_FILES
    path = next((path for path in candidates if path.is_file()), None)
    if path is None:
        raise ConfigError(
            f"data.file: {' or '.join(map(str, candidates))} does not exist; create the file, or set data.file to "
            "its path [TM035]"
        )
    return path


def read_datasets_file(file: Path) -> dict[str, Any]:
    """Read the entries of a file by name."""
    entries = parse_yaml(read_text(file, MAX_YAML_BYTES), file)
    if not isinstance(entries, dict) or not entries:
        raise ConfigError(
            f"{file}: expected a mapping from dataset names to settings; write for example faces: {{type: "
            "image_collection, path: faces} [TM037]"
        )
    return entries
