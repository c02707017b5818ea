"""Text files with one sample per row: .txt, .jsonl, .json, .csv, and YAML mixtures of them.

Every error names the file and the line.
"""

from __future__ import annotations

import csv
import io
import math
import os
import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from ..core import safe_files
from ..core.registry import ConfigError
from ..core.types import Metadata

T = TypeVar("T")
Row = Mapping[str, Any]
SAMPLING_STRATEGY = re.compile(r"(first|end|random):(\d+(?:\.\d+)?)(%?)$")


def read_text(path: Path) -> str:
    """The text of a file that is not empty."""
    text = safe_files.read_text(path, safe_files.MAX_ROWS_BYTES)
    if not text.strip():
        raise ConfigError(f"{path}: the file is empty; add at least one row [TM226]")
    return text


def read_lines(path: Path) -> list[tuple[int, str]]:
    """The lines that are not blank, with their line numbers."""
    return [(number, line.strip()) for number, line in enumerate(read_text(path).split("\n"), 1) if line.strip()]


def read_json_rows(path: Path) -> list[tuple[int, Row]]:
    """The rows of a JSONL file, with their line numbers."""
    return [(number, _parse_row(path, number, line)) for number, line in read_lines(path)]


def _parse_row(path: Path, number: int, line: str) -> Row:
    row = safe_files.parse_json(line, f"{path}, line {number}")
    if not isinstance(row, dict):
        raise ConfigError(
            f'{path}, line {number}: expected an object such as {{"prompt": ...}}, got {line:.40}; correct this '
            "line [TM228]"
        )
    return row


def read_csv_rows(path: Path) -> list[tuple[int, Row]]:
    """The rows of a CSV file whose first line names the columns, with their line numbers."""
    reader = csv.DictReader(io.StringIO(read_text(path), newline=""), strict=True)
    try:
        rows: list[tuple[int, Row]] = [(reader.line_num, row) for row in reader]
    except csv.Error as error:
        if "field limit" in str(error):
            raise ConfigError(
                f"{path}, line {reader.line_num + 1}: a field has more than {csv.field_size_limit()} characters; close "
                "its quotes, or write longer texts to a .jsonl file [TM1166]"
            ) from error
        raise ConfigError(
            f"{path}, line {reader.line_num}: not CSV ({error}); check the quotes in this line [TM229]"
        ) from error
    for number, row in rows:
        if None in row or None in row.values():
            columns = len(reader.fieldnames or ())
            raise ConfigError(
                f"{path}, line {number}: expected {columns} columns as in the first line; check the commas in "
                "this line [TM230]"
            )
    if not rows:
        raise ConfigError(f"{path}: the file has column names but no rows; add at least one row [TM231]")
    return rows


def get_text(path: Path, number: int, row: Row, column: str) -> str:
    """The text in a column of line `number`."""
    return _get_text(f"{path}, line {number}", row, column)


def _get_text(location: str, row: Row, column: str) -> str:
    if column not in row:
        raise ConfigError(
            f"{location}: '{column}' is missing; found {', '.join(map(str, row)) or 'nothing'}; add '{column}' [TM232]"
        )
    text = row[column]
    if not isinstance(text, str):
        raise ConfigError(f"{location}: '{column}' is {text!r:.40}; expected text [TM233]")
    return text


def row_metadata(row: Row, prompt_column: str = "prompt") -> Metadata:
    """All columns but the prompt."""
    return {key: value for key, value in row.items() if key != prompt_column}


def require_file(path: Path, location: str) -> Path:
    """The path of a file that is named at `location`; refuses one that does not exist."""
    if not os.path.isfile(path):  # pathlib raises an error if a name is too long
        raise ConfigError(
            f"{location}: the file {path} does not exist; correct the path, which is relative to the file that "
            "names it [TM234]"
        )
    return path


@dataclass(frozen=True)
class MixtureRow:
    """A row and where it is written."""

    file: Path
    location: str  # for messages
    row: Row

    def get_text(self, column: str) -> str:
        return _get_text(self.location, self.row, column)


def read_mixture(path: Path, seed: int) -> list[MixtureRow]:
    """All rows of a .jsonl, of a .json list, or of a .yaml that mixes such files as LLaVA's trainers do."""
    if path.suffix in (".yaml", ".yml"):
        return [
            row
            for file, strategy in _read_mixture_files(path)
            for row in sample_rows(_read_rows(file), strategy, seed, str(path))
        ]
    return _read_rows(path)


def sample_rows(rows: Sequence[T], strategy: str, seed: int, location: str) -> list[T]:
    """Apply LLaVA's sampling_strategy: `all`, or `first`, `end` or `random` with a number or percentage of rows.

    Percentages are rounded up: `random:50%`.
    """
    if strategy == "all":
        return list(rows)
    match = SAMPLING_STRATEGY.match(strategy)
    if match is None:
        raise ConfigError(
            f"{location}: sampling_strategy is '{strategy:.40}'; write all, first:n, end:n or random:n% [TM235]"
        )
    amount = float(match[2])
    count = min(len(rows), math.ceil(amount * len(rows) / 100 if match[3] else amount))
    if match[1] == "random":
        return random.Random(seed).sample(list(rows), count)
    return list(rows[:count] if match[1] == "first" else rows[len(rows) - count :])


def _read_rows(path: Path) -> list[MixtureRow]:
    if path.suffix != ".json":
        return [MixtureRow(path, f"{path}, line {number}", row) for number, row in read_json_rows(path)]
    rows = safe_files.parse_json(read_text(path), path)
    if not isinstance(rows, list) or not rows or not all(isinstance(row, dict) for row in rows):
        raise ConfigError(
            f"{path}: expected a list of objects, got {type(rows).__name__}; write [{{...}}, {{...}}] with at "
            "least one object [TM237]"
        )
    return [MixtureRow(path, f"{path}, row {number}", row) for number, row in enumerate(rows, 1)]


def _read_mixture_files(path: Path) -> list[tuple[Path, str]]:
    """The files of a mixture and their sampling strategies."""
    document = safe_files.parse_yaml(read_text(path), path)
    entries = document.get("datasets") if isinstance(document, dict) else None
    if not isinstance(entries, list) or not entries:
        raise ConfigError(
            f"{path}: `datasets:` is missing or empty; write `datasets:` with a list of entries that have json_path "
            "and sampling_strategy [TM239]"
        )
    files = []
    for entry in entries:
        if not isinstance(entry, dict) or not isinstance(entry.get("json_path"), str):
            raise ConfigError(
                f"{path}: expected a mapping with json_path as an entry of `datasets:`, got {entry!r:.60}; add "
                "json_path [TM240]"
            )
        file = require_file(path.parent / entry["json_path"], str(path))
        files.append((file, str(entry.get("sampling_strategy", "all"))))
    return files
