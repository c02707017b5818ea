"""Prompts about pictures that are there already."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from ..core.registry import ConfigError
from ..core.types import Metadata, PromptBatch
from .prompts import PromptDataset, check_exists, row_metadata
from .text_files import Row, read_csv_rows, read_json_rows, text_field

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

    def load(self, seed: int) -> PromptDataset:
        path = self.path or EXAMPLES
        found = read_json_rows(path) if path.suffix == ".jsonl" else read_csv_rows(path)
        prompts = [text_field(path, number, row, "prompt") for number, row in found]
        return PromptDataset(tuple(prompts), tuple(edit_metadata(path, number, row) for number, row in found), seed)


def edit_metadata(path: Path, number: int, row: Row) -> Metadata:
    """What a row says beside its prompt, with the places of the files it names."""
    if not isinstance(row.get("image"), str):
        raise ConfigError(f"{path}, line {number}: there is no 'image'; expected the path of the picture to edit")
    named = {
        key: str(check_exists(path.parent / str(row[key]), f"{path}, line {number}")) for key in PATHS if key in row
    }
    return {**row_metadata(row), **named}
