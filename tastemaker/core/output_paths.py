"""Checks of output paths, before a command loads anything."""

from __future__ import annotations

import os
from pathlib import Path

from .registry import ConfigError


def check_output_directory(path: Path, option: str = "--out") -> Path:
    """Return the path if it is a directory that can be written to, or if it can be created."""
    nearest = next(place for place in (path, *path.parents, Path()) if os.path.lexists(place))
    if not nearest.is_dir():
        raise ConfigError(f"{option}: {nearest} is a file; expected a directory to write to")
    if not os.access(nearest, os.W_OK | os.X_OK):
        raise ConfigError(f"{option}: {nearest} is not writable; choose another directory, or change its permissions")
    return path


def check_output_file(path: Path, option: str = "--out") -> Path:
    """Return the path if it is a file that can be written, or if it can be created."""
    if path.is_dir():
        raise ConfigError(f"{option}: {path} is a directory; expected a file to write to, such as one in it")
    check_output_directory(path.parent, option)
    return path
