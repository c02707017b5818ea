"""Prompts, written out in the configuration or read from a file."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from .. import embeddings
from ..registry import ConfigError
from ..types import Facts, PromptBatch
from .order import rows
from .saved import texts
from .text import Row, field, json_rows, lines, table_rows


@dataclass(frozen=True)
class PromptRows:
    """Prompts in memory, in a new order every epoch."""

    prompts: tuple[str, ...]
    facts: tuple[Facts, ...]
    seed: int

    def __len__(self) -> int:
        return len(self.prompts)

    def batch(self, step: int, size: int, rank: int, world: int) -> PromptBatch:
        return self._of(rows(len(self), self.seed, step, size, rank, world))

    def first(self, count: int) -> PromptBatch:
        return self._of([i % len(self) for i in range(count)])

    def _of(self, chosen: list[int]) -> PromptBatch:
        return PromptBatch(tuple(self.prompts[i] for i in chosen), tuple(self.facts[i] for i in chosen))


@dataclass(frozen=True)
class InlinePrompts:
    """Prompts written out in the configuration."""

    prompts: tuple[str, ...]
    yields: ClassVar[type] = PromptBatch

    def __post_init__(self) -> None:
        if not self.prompts:
            raise ValueError("'prompts' is empty; expected at least one prompt")

    def load(self, seed: int) -> PromptRows:
        return PromptRows(self.prompts, ({},) * len(self.prompts), seed)


@dataclass(frozen=True)
class PromptFile:
    """Prompts in a file: .txt with one a line, .jsonl or .csv with a column `prompt`; other columns become facts.

    A .json is a list of prompts, as those of HPDv2, or that of a folder of embeddings: videos2caption.json of SRPO, or
    our embeddings.json. A folder is what `datasets` saved to disk, prompts in its column prompt, caption or text.
    """

    path: Path
    split: str = "train"  # of what `datasets` saved
    yields: ClassVar[type] = PromptBatch

    def __post_init__(self) -> None:
        if not readable(self.path):
            raise ValueError(f"'path' is {str(self.path)!r:.60}; expected a file that ends in .txt, .jsonl or .csv")

    def load(self, seed: int) -> PromptRows:
        if self.path.is_dir():
            column, told = texts(self.path, self.split)
            prompts = [field(self.path, number, row, column) for number, row in enumerate(told, 1)]
            return PromptRows(tuple(prompts), tuple(facts(row, column) for row in told), seed)
        if self.path.suffix == ".json":
            embedded = embeddings.prompts(self.path)
            return PromptRows(tuple(embedded), ({},) * len(embedded), seed)
        if self.path.suffix == ".txt":
            prompts = [line for _, line in lines(self.path)]
            return PromptRows(tuple(prompts), ({},) * len(prompts), seed)
        found = json_rows(self.path) if self.path.suffix == ".jsonl" else table_rows(self.path)
        prompts = [field(self.path, number, row, "prompt") for number, row in found]
        return PromptRows(tuple(prompts), tuple(facts(row) for _, row in found), seed)


def readable(path: Path) -> bool:
    """Whether prompts are looked for in a path of that name."""
    return path.suffix in (".txt", ".jsonl", ".csv", ".json") or path.is_dir()


def given(path: Path, option: str = "--prompts") -> PromptFile:
    """The file of prompts that an option names."""
    if not readable(path):
        raise ConfigError(f"{option}: found '{path!s:.200}'; expected a file that ends in .txt, .jsonl or .csv")
    return PromptFile(path)


def facts(row: Row, column: str = "prompt") -> Facts:
    """What a row says beside its prompt."""
    return {key: value for key, value in row.items() if key != column}


def existing(path: Path, said_by: str) -> Path:
    """A file that another file names, which must be there."""
    if not path.is_file():
        raise ConfigError(f"{said_by}: there is no file {path}; paths are relative to the file that names them")
    return path
