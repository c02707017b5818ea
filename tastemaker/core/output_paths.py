"""Where a command writes to: refused before anything is loaded if nothing can be written there."""

from __future__ import annotations

import os
from pathlib import Path

from .registry import ConfigError


def check_output_directory(path: Path, option: str = "--out") -> Path:
    """A folder that is there, or that can be made; a file in its way is left as it is."""
    nearest = next(place for place in (path, *path.parents, Path()) if os.path.lexists(place))
    if not nearest.is_dir():
        raise ConfigError(f"{option}: {nearest} is a file; expected a folder to write to, so name another")
    if not os.access(nearest, os.W_OK | os.X_OK):
        raise ConfigError(f"{option}: nothing may be written in {nearest}; name another, or change its permissions")
    return path


def check_output_file(path: Path, option: str = "--out") -> Path:
    """A file that is there or can be made, in a folder that is or can be."""
    if path.is_dir():
        raise ConfigError(f"{option}: {path} is a folder; expected a file to write to, so name one in it")
    check_output_directory(path.parent, option)
    return path
