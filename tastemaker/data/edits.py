"""Prompts about pictures that are there already."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from ..registry import ConfigError
from ..types import Facts, PromptBatch
from .prompts import PromptRows, existing, facts
from .text import Row, field, json_rows, table_rows

EXAMPLES = Path(__file__).parent.parent / "recipes" / "data" / "edits" / "edits.jsonl"
PATHS = ("image", "target")  # columns that name files, from the folder of the file that names them


@dataclass(frozen=True)
class EditFile:
    """Prompts and the pictures they are about, in the columns `prompt` and `image` of a .jsonl or .csv; others become
    facts."""

    path: Path | None = None  # a few small pictures to try a recipe with, if not given
    yields: ClassVar[type] = PromptBatch

    def __post_init__(self) -> None:
        if self.path is not None and self.path.suffix not in (".jsonl", ".csv"):
            raise ValueError(f"'path' is {str(self.path)!r:.60}; expected a file that ends in .jsonl or .csv")

    def load(self, seed: int) -> PromptRows:
        path = self.path or EXAMPLES
        found = json_rows(path) if path.suffix == ".jsonl" else table_rows(path)
        prompts = [field(path, number, row, "prompt") for number, row in found]
        return PromptRows(tuple(prompts), tuple(known(path, number, row) for number, row in found), seed)


def known(path: Path, number: int, row: Row) -> Facts:
    """What a row says beside its prompt, with the places of the files it names."""
    if not isinstance(row.get("image"), str):
        raise ConfigError(f"{path}, line {number}: there is no 'image'; expected the path of the picture to edit")
    named = {key: str(existing(path.parent / str(row[key]), f"{path}, line {number}")) for key in PATHS if key in row}
    return {**facts(row), **named}
