"""Prompts, written out in the configuration or read from a file."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from ..core.registry import ConfigError
from ..core.types import Metadata, PromptBatch
from . import embedding_store
from .hf_datasets import load_texts
from .sampler import batch_indices
from .text_files import Row, read_csv_rows, read_json_rows, read_lines, text_field


@dataclass(frozen=True)
class PromptDataset:
    """Prompts in memory, in a new order every epoch."""

    prompts: tuple[str, ...]
    facts: tuple[Metadata, ...]
    seed: int

    def __len__(self) -> int:
        return len(self.prompts)

    def batch(self, step: int, size: int, rank: int, world: int) -> PromptBatch:
        return self._of(batch_indices(len(self), self.seed, step, size, rank, world))

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

    def load(self, seed: int) -> PromptDataset:
        return PromptDataset(self.prompts, ({},) * len(self.prompts), seed)


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
        if not is_prompt_file(self.path):
            raise ValueError(f"'path' is {str(self.path)!r:.60}; expected a file that ends in .txt, .jsonl or .csv")

    def load(self, seed: int) -> PromptDataset:
        if self.path.is_dir():
            column, told = load_texts(self.path, self.split)
            prompts = [text_field(self.path, number, row, column) for number, row in enumerate(told, 1)]
            return PromptDataset(tuple(prompts), tuple(row_metadata(row, column) for row in told), seed)
        if self.path.suffix == ".json":
            embedded = embedding_store.list_embedded_prompts(self.path)
            return PromptDataset(tuple(embedded), ({},) * len(embedded), seed)
        if self.path.suffix == ".txt":
            prompts = [line for _, line in read_lines(self.path)]
            return PromptDataset(tuple(prompts), ({},) * len(prompts), seed)
        found = read_json_rows(self.path) if self.path.suffix == ".jsonl" else read_csv_rows(self.path)
        prompts = [text_field(self.path, number, row, "prompt") for number, row in found]
        return PromptDataset(tuple(prompts), tuple(row_metadata(row) for _, row in found), seed)


def is_prompt_file(path: Path) -> bool:
    """Whether prompts are looked for in a path of that name."""
    return path.suffix in (".txt", ".jsonl", ".csv", ".json") or path.is_dir()


def check_prompt_file(path: Path, option: str = "--prompts") -> PromptFile:
    """The file of prompts that an option names."""
    if not is_prompt_file(path):
        raise ConfigError(f"{option}: found '{path!s:.200}'; expected a file that ends in .txt, .jsonl or .csv")
    return PromptFile(path)


def row_metadata(row: Row, column: str = "prompt") -> Metadata:
    """What a row says beside its prompt."""
    return {key: value for key, value in row.items() if key != column}


def check_exists(path: Path, said_by: str) -> Path:
    """A file that another file names, which must be there."""
    if not path.is_file():
        raise ConfigError(f"{said_by}: there is no file {path}; paths are relative to the file that names them")
    return path
