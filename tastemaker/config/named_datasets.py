"""A file of your own that gives data sets names: `data: {type: named, name: faces}` is what `faces` says there."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..core.registry import ConfigError, suggest_name
from .yaml_io import parse_yaml

NAMED = "named"
FILES = (Path("datasets.yaml"), Path("configs/datasets.yaml"))  # the first that is there
CHANNELS = {1: True, 3: False}  # whether pictures are grey


def resolve_named_dataset(settings: Mapping[str, Any]) -> dict[str, Any]:
    """What a name stands for, under whatever else is said beside it; other settings stay as they are."""
    if settings.get("type") != NAMED:
        return dict(settings)
    file, name = find_datasets_file(settings.get("file")), settings.get("name")
    known = read_datasets_file(file)
    if not isinstance(name, str) or name not in known:
        said = f"'{name:.60}'" if isinstance(name, str) else "what has no name"
        raise ConfigError(f"{file} does not know {said}{suggest_name(str(name), known)}")
    entry = known[name]
    kind = entry.get("type") if isinstance(entry, Mapping) else None
    if not isinstance(kind, str) or kind == NAMED:
        found = f"of the type {kind!r:.40}" if isinstance(entry, Mapping) else f"{entry!r:.60}"
        raise ConfigError(f"{file}: '{name:.60}' is {found}; expected settings such as {{type: gallery, path: faces}}")
    beside = {key: value for key, value in settings.items() if key not in ("type", "name", "file")}
    return {**normalize_entry(entry, f"{file}: {name}"), **beside}


def find_datasets_file(file: object) -> Path:
    """The file that is given, or one of the usual, where the command is run."""
    if file is not None and not isinstance(file, str | Path):
        raise ConfigError(f"file is {file!r:.60}; expected the path of a file that names data sets")
    tried = (Path(file),) if file is not None else FILES
    found = next((path for path in tried if path.is_file()), None)
    if found is None:
        raise ConfigError(f"there is no {' or '.join(map(str, tried))}; write one, or set file to where it is")
    return found


def read_datasets_file(file: Path) -> dict[str, Any]:
    try:
        found = parse_yaml(file.read_text(encoding="utf-8"), str(file))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file}: cannot be read ({error}); expected UTF-8 text") from error
    if not isinstance(found, dict) or not found:
        raise ConfigError(f"{file}: expected names of data sets, each with its settings")
    return found


def normalize_entry(entry: Mapping[str, Any], where: str) -> dict[str, Any]:
    """An entry by our names, which nanoVLA-RL's are of one type."""
    return convert_image_folder(entry, where) if entry.get("type") == "image_folder" else dict(entry)


def convert_image_folder(entry: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Pictures as nanoVLA-RL writes them down, {path, im_size, im_channels}, by our names."""
    others = {key: value for key, value in entry.items() if key not in ("type", "im_size", "im_channels")}
    channels = entry.get("im_channels", 3)
    if channels not in CHANNELS:
        raise ConfigError(f"{where}: im_channels is {channels!r:.40}; expected 1 or 3")
    sized = {"size": entry["im_size"]} if "im_size" in entry else {}
    grey = {"grey": True} if CHANNELS[channels] else {}
    return {"type": "gallery", **others, **sized, **grey}
