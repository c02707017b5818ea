"""Prompts: inline, from files, of classes and of named sets."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from ..core.registry import ConfigError, suggest_name
from ..core.types import Metadata, PromptBatch
from .class_labels import make_class_labels
from .dataset import ShuffledDataset
from .edits import EditFile as EditFile
from .embedding_store import list_embedded_prompts
from .hf_datasets import load_prompts
from .prompt_sets import load_prompt_templates, set_prompts, vader_set_names
from .text_files import Row, get_text, read_csv_rows, read_json_rows, read_lines, row_metadata

HELD_OUT_STRIDE = 5  # every fifth prompt of a named set is held out


@dataclass(frozen=True)
class PromptDataset(ShuffledDataset):
    """Prompts in memory, in a new order every epoch."""

    prompts: tuple[str, ...]
    metadata: tuple[Metadata, ...]
    seed: int

    def first_prompts(self, count: int) -> PromptBatch:
        return self.collate([i % len(self) for i in range(count)])

    def collate(self, indices: list[int]) -> PromptBatch:
        return PromptBatch(tuple(self.prompts[i] for i in indices), tuple(self.metadata[i] for i in indices))


@dataclass(frozen=True)
class InlinePrompts:
    """Prompts written out in the configuration."""

    prompts: tuple[str, ...]
    batch_type: ClassVar[type] = PromptBatch

    def __post_init__(self) -> None:
        if not self.prompts:
            raise ValueError("'prompts' is empty; add at least one prompt [TM216]")

    def load(self, seed: int) -> PromptDataset:
        return PromptDataset(self.prompts, ({},) * len(self.prompts), seed)


@dataclass(frozen=True)
class PromptFile:
    """Prompts in a file: .txt with one per line, .jsonl or .csv with a column `prompt` or `caption`.

    Other columns are metadata.

    A .json is a list of prompts, as HPDv2's, or the index of a folder of embeddings: SRPO's videos2caption.json, or
    our embeddings.json. A folder is a data set saved by `datasets`, with a column prompt, caption or text.
    """

    path: Path
    split: str = "train"  # of a data set saved by `datasets`
    batch_type: ClassVar[type] = PromptBatch

    def __post_init__(self) -> None:
        if not is_prompt_file(self.path):
            raise ValueError(
                f"'path': expected a file name that ends in .txt, .jsonl or .csv, got {str(self.path)!r:.60}; "
                "convert or rename the file [TM217]"
            )

    def load(self, seed: int) -> PromptDataset:
        if self.path.is_dir():
            column, table = load_prompts(self.path, self.split)
            prompts = [get_text(self.path, number, row, column) for number, row in enumerate(table, 1)]
            return PromptDataset(tuple(prompts), tuple(row_metadata(row, column) for row in table), seed)
        if self.path.suffix in (".json", ".txt"):
            is_list = self.path.suffix == ".json"
            prompts = list_embedded_prompts(self.path) if is_list else [line for _, line in read_lines(self.path)]
            return PromptDataset(tuple(prompts), ({},) * len(prompts), seed)
        rows = read_rows(self.path)
        column = "caption" if "caption" in rows[0][1] and "prompt" not in rows[0][1] else "prompt"
        prompts = [get_text(self.path, number, row, column) for number, row in rows]
        return PromptDataset(tuple(prompts), tuple(row_metadata(row, column) for _, row in rows), seed)


def read_rows(path: Path) -> list[tuple[int, Row]]:
    """The rows of a .jsonl or .csv, with their line numbers."""
    return read_json_rows(path) if path.suffix == ".jsonl" else read_csv_rows(path)


def is_prompt_file(path: Path) -> bool:
    """Whether a path has a suffix of prompt files or is a folder."""
    return path.suffix in (".txt", ".jsonl", ".csv", ".json") or path.is_dir()


def open_prompt_file(path: Path, option: str = "--prompts") -> PromptFile:
    """The prompt file that a command-line option names."""
    if not is_prompt_file(path):
        raise ConfigError(
            f"{option}: expected a file name that ends in .txt, .jsonl or .csv, got '{path!s:.200}'; convert or "
            "rename the file [TM218]"
        )
    return PromptFile(path)


@dataclass(frozen=True)
class ClassPrompts:
    """A prompt per class, with the class id as metadata `label`; names that two classes share are left out."""

    num_classes: Annotated[int, Field(ge=1, le=10**6)] = 1000
    class_names: tuple[str, ...] = ()  # by class id; by default ImageNet's, if there are 1000 classes
    template: str = "a photo of a {name}"
    batch_type: ClassVar[type] = PromptBatch

    def __post_init__(self) -> None:
        make_class_labels(self.num_classes, self.class_names)
        if "{" in self.template.replace("{name}", "") or "{name}" not in self.template:
            raise ValueError(
                f"'template': expected text with {{name}} once and without other braces, got {self.template!r:.60}; "
                "write for example a photo of a {name} [TM219]"
            )

    def load(self, seed: int) -> PromptDataset:
        labels = make_class_labels(self.num_classes, self.class_names)
        prompts = {}
        for label in range(self.num_classes):
            text = self.template.replace("{name}", labels.name(label))
            with suppress(ConfigError):  # the text names several classes
                if labels.find_class(text) == label:
                    prompts[label] = text
        if not prompts:
            raise ConfigError(
                f"data.template: the playground cannot parse {self.template!r:.60} with any class name; set "
                "data.template='{name}' [TM220]"
            )
        return PromptDataset(tuple(prompts.values()), tuple({"label": label} for label in prompts), seed)


@dataclass(frozen=True)
class PromptSet:
    """Prompts of a named set, such as animals or actions, with the words they are made of as metadata.

    `actions` and the `kinetics` sets have the `action` that actpred looks for, `rainy` and `snowy` the `weather`, and
    the `without` sets the `object` that a detector is to find or to miss. VADER's function names are aliases.
    """

    name: str
    split: Literal["all", "train", "held_out"] = "all"  # every fifth prompt is held out
    batch_type: ClassVar[type] = PromptBatch

    def __post_init__(self) -> None:
        names = [*load_prompt_templates(), *vader_set_names()]
        if self.name not in names:
            raise ValueError(f"unknown prompt set '{self.name:.60}'{suggest_name(self.name, names)} [TM221]")

    def load(self, seed: int) -> PromptDataset:
        prompts = [
            prompt
            for i, prompt in enumerate(set_prompts(vader_set_names().get(self.name, self.name)))
            if self.split == "all" or (i % HELD_OUT_STRIDE == 0) == (self.split == "held_out")
        ]
        return PromptDataset(tuple(text for text, _ in prompts), tuple(metadata for _, metadata in prompts), seed)
