"""Rows of a .jsonl, of a .json list, or of a .yaml that mixes several such files, as LLaVA's trainers list them."""

from __future__ import annotations

import json
import math
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import yaml

from ..core.registry import ConfigError
from .text_files import Row, read_json_rows, read_text

T = TypeVar("T")
SHARE = re.compile(r"(first|end|random):(\d+(?:\.\d+)?)(%?)$")


@dataclass(frozen=True)
class FileRow:
    """A row and where it is written."""

    file: Path
    place: str  # for messages
    row: Row

    def text(self, name: str) -> str:
        """What a column says."""
        if name not in self.row:
            found = ", ".join(map(str, self.row)) or "nothing"
            raise ConfigError(f"{self.place}: '{name}' is missing; found {found}")
        if not isinstance(self.row[name], str):
            raise ConfigError(f"{self.place}: '{name}' is {self.row[name]!r:.40}, expected text")
        return str(self.row[name])


def read_mixture(path: Path, seed: int) -> list[FileRow]:
    """All rows a file names, in its order."""
    if path.suffix in (".yaml", ".yml"):
        return [line for file, share in _listed(path) for line in take_share(_rows(file), share, seed, str(path))]
    return _rows(path)


def take_share(rows: Sequence[T], share: str, seed: int, where: str) -> list[T]:
    """`all` rows, or `first`, `end` or `random` so many of them, or so many percent, rounded up: `random:50%`."""
    if share == "all":
        return list(rows)
    found = SHARE.match(share)
    if found is None:
        raise ConfigError(f"{where}: sampling_strategy is '{share:.40}'; expected all, first:n, end:n or random:n%")
    size = float(found[2])
    count = min(len(rows), math.ceil(size * len(rows) / 100 if found[3] else size))
    if found[1] == "random":
        return random.Random(seed).sample(list(rows), count)
    return list(rows[:count] if found[1] == "first" else rows[len(rows) - count :])


def _rows(path: Path) -> list[FileRow]:
    if path.suffix != ".json":
        return [FileRow(path, f"{path}, line {number}", row) for number, row in read_json_rows(path)]
    try:
        rows = json.loads(read_text(path))
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: not JSON ({error}); expected a list of objects in brackets") from error
    if not isinstance(rows, list) or not rows or not all(isinstance(row, dict) for row in rows):
        raise ConfigError(f"{path}: expected a list of objects, found {type(rows).__name__}; write rows in brackets")
    return [FileRow(path, f"{path}, row {number}", row) for number, row in enumerate(rows, 1)]


def _listed(path: Path) -> list[tuple[Path, str]]:
    """The files of a mixture, and how much of each is taken."""
    try:
        told: Any = yaml.safe_load(read_text(path))
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: not YAML ({' '.join(str(error).split())}); expected `datasets:`") from error
    listed = told.get("datasets") if isinstance(told, dict) else None
    if not isinstance(listed, list) or not listed:
        raise ConfigError(f"{path}: expected `datasets:` with a list of json_path and sampling_strategy")
    found = []
    for entry in listed:
        if not isinstance(entry, dict) or not isinstance(entry.get("json_path"), str):
            raise ConfigError(f"{path}: a data set is {entry!r:.60}; expected a mapping with json_path")
        file = path.parent / entry["json_path"]
        if not file.is_file():
            raise ConfigError(f"{path}: there is no file {file}; paths are relative to the file that names them")
        found.append((file, str(entry.get("sampling_strategy", "all"))))
    return found
