"""Prompts with a picture of each: what SRPO learns from offline."""

from __future__ import annotations

import json
import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, NoReturn

import torch
from torch import Tensor

from ..core.registry import ConfigError
from ..core.types import Metadata, PromptBatch
from .aspect_buckets import Size, default_buckets, nearest_bucket, schedule_bucket
from .image_io import image_size, read_image, resize_lanczos
from .prompts import check_exists
from .text_files import Row, read_json_rows, read_text, text_field

NAMES = (("prompt", "caption"), ("image", "file_name"))  # columns, each by either name
Entry = tuple[str, str, Metadata, str]  # prompt, picture, facts, and where that is written
SUFFIXES = (".jsonl", ".json", ".pkl")


@dataclass(frozen=True)
class IllustratedDataset:
    """Pictures on disk, decoded when their turn comes and brought to the size of their bucket; a step has one size."""

    prompts: tuple[str, ...]
    facts: tuple[Metadata, ...]
    files: tuple[Path, ...]
    buckets: tuple[Size, ...]
    seed: int

    def __len__(self) -> int:
        return len(self.prompts)

    @cached_property
    def members(self) -> dict[Size, list[int]]:
        """The rows of each bucket that has any."""
        found: dict[Size, list[int]] = {}
        for row, file in enumerate(self.files):
            found.setdefault(nearest_bucket(*image_size(file), self.buckets), []).append(row)
        return found

    def batch(self, step: int, size: int, rank: int, world: int) -> PromptBatch:
        number, chosen = schedule_bucket([len(rows) for rows in self.members.values()], self.seed, step, size)
        bucket, rows = list(self.members.items())[number]
        share = [rows[i] for i in chosen[rank * size // world : (rank + 1) * size // world]]
        pictures = torch.stack([self._picture(row, bucket) for row in share])
        return PromptBatch(tuple(self.prompts[i] for i in share), tuple(self.facts[i] for i in share), pictures)

    def _picture(self, row: int, bucket: Size) -> Tensor:
        return resize_lanczos(read_image(self.files[row])[:1], *bucket)

    def first(self, count: int) -> PromptBatch:
        rows = [i % len(self) for i in range(count)]
        return PromptBatch(tuple(self.prompts[i] for i in rows), tuple(self.facts[i] for i in rows))


@dataclass(frozen=True)
class IllustratedPrompts:
    """Prompts and a picture of each: a .jsonl with the columns `prompt` and `image`, or SRPO's .json or .pkl that says
    of each caption where its picture is; paths begin at the file."""

    path: Path
    buckets: tuple[Size, ...] = ()  # heights and widths pictures are brought to; those of SRPO if none are given
    yields: ClassVar[type] = PromptBatch

    def __post_init__(self) -> None:
        if self.path.suffix not in SUFFIXES:
            raise ValueError(f"'path' is {str(self.path)!r:.60}; expected a file that ends in {', '.join(SUFFIXES)}")
        wrong = [size for size in self.buckets if any(side % 16 or not 16 <= side <= 8192 for side in size)]
        if wrong:
            raise ValueError(f"'buckets' has {list(wrong[0])}; expected multiples of 16, from 16 to 8192")

    def load(self, seed: int) -> IllustratedDataset:
        rows = read_jsonl_entries(self.path) if self.path.suffix == ".jsonl" else read_caption_map(self.path)
        files = tuple(check_exists(self.path.parent / file, place) for _, file, _, place in rows)
        prompts, facts = tuple(prompt for prompt, *_ in rows), tuple(known for *_, known, _ in rows)
        return IllustratedDataset(prompts, facts, files, self.buckets or default_buckets(), seed)


def read_jsonl_entries(path: Path) -> list[Entry]:
    """The rows of a JSONL file."""
    found: list[Entry] = []
    for number, row in read_json_rows(path):
        prompt, image = (text_field(path, number, row, column(row, names)) for names in NAMES)
        facts = {key: value for key, value in row.items() if not any(key in names for names in NAMES)}
        found.append((prompt, image, facts, f"{path}, line {number}"))
    return found


def column(row: Row, names: tuple[str, str]) -> str:
    return names[1] if names[1] in row and names[0] not in row else names[0]


def read_caption_map(path: Path) -> list[Entry]:
    """Read the entries of a file that maps captions to images."""
    told = load_document(path)
    if not isinstance(told, Mapping) or not all(isinstance(x, str) for pair in told.items() for x in pair) or not told:
        raise ConfigError(f"{path} holds no captions with a path of a picture each; expected such a mapping, or .jsonl")
    return [(caption, image, {}, f"{path}, '{caption:.40}'") for caption, image in told.items()]


class PlainDataUnpickler(pickle.Unpickler):
    """Reads texts, numbers and what holds them; anything else could run code."""

    def find_class(self, module: str, name: str) -> NoReturn:
        raise pickle.UnpicklingError(f"it asks for {module}.{name}, which could run code")


def load_document(path: Path) -> Any:
    try:
        if path.suffix == ".json":
            return json.loads(read_text(path))
        with path.open("rb") as file:
            return PlainDataUnpickler(file).load()
    except (OSError, ValueError, EOFError, RecursionError, pickle.UnpicklingError, IndexError, KeyError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{path} cannot be read ({error!s:.200}); write it as .jsonl") from error
