"""Text files of rows: each mistake is a sentence that names the file and the line."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..core.registry import ConfigError

Row = Mapping[str, Any]


def read_text(path: Path) -> str:
    """The whole text of a file that is not empty."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: byte {error.start} is not UTF-8; save the file as UTF-8 text") from error
    except (OSError, ValueError) as error:  # a path may hold characters no file system takes
        raise ConfigError(f"{path}: cannot be read ({error}); check the path and its permissions") from error
    if not text.strip():
        raise ConfigError(f"{path}: the file is empty; expected at least one row")
    return text


def read_lines(path: Path) -> list[tuple[int, str]]:
    """The lines that are not blank, with their numbers."""
    return [(number, line.strip()) for number, line in enumerate(read_text(path).split("\n"), 1) if line.strip()]


def read_json_rows(path: Path) -> list[tuple[int, Row]]:
    """The rows of a JSONL file, with their line numbers."""
    return [(number, _mapping(path, number, line)) for number, line in read_lines(path)]


def _mapping(path: Path, number: int, line: str) -> Row:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}, line {number}: not JSON ({error}); expected one object a line") from error
    if not isinstance(row, dict):
        raise ConfigError(f'{path}, line {number}: expected an object such as {{"prompt": ...}}, found {line:.40}')
    return row


def read_csv_rows(path: Path) -> list[tuple[int, Row]]:
    """The rows of a CSV file whose first line names the columns, with their line numbers."""
    reader = csv.DictReader(io.StringIO(read_text(path), newline=""), strict=True)
    try:
        found: list[tuple[int, Row]] = [(reader.line_num, row) for row in reader]
    except csv.Error as error:
        raise ConfigError(f"{path}, line {reader.line_num}: not CSV ({error}); check its quotes") from error
    for number, row in found:
        if None in row or None in row.values():
            wanted = len(reader.fieldnames or ())
            raise ConfigError(
                f"{path}, line {number}: expected {wanted} columns as in the first line; check its commas"
            )
    if not found:
        raise ConfigError(f"{path}: there are no rows below the line of column names; expected at least one")
    return found


def text_field(path: Path, number: int, row: Row, name: str) -> str:
    """The text in a column."""
    if name not in row:
        raise ConfigError(f"{path}, line {number}: '{name}' is missing; found {', '.join(map(str, row)) or 'nothing'}")
    if not isinstance(row[name], str):
        raise ConfigError(f"{path}, line {number}: '{name}' is {row[name]!r:.40}, expected text")
    text: str = row[name]
    return text
