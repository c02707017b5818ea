"""Two pictures of each prompt, the first preferred."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from ..pictures import read_picture
from ..types import Pairs, PromptBatch
from .order import rows
from .pictures import Plain, counted, sided, squared, stacked
from .prompts import existing
from .text import field, json_rows


@dataclass(frozen=True)
class PlainPairs:
    plain: Plain
    first_number: int
    count: int
    seed: int

    def __len__(self) -> int:
        return self.count

    def batch(self, step: int, size: int, rank: int, world: int) -> Pairs:
        numbers = [self.first_number + row for row in rows(len(self), self.seed, step, size, rank, world)]
        right = [self.plain.color(number) for number in numbers]
        wrong = [self.plain.color(number, self._further(number)) for number in numbers]
        chosen, rejected = self.plain.pictures(numbers, right), self.plain.pictures(numbers, wrong, "rejected")
        return Pairs(tuple(f"a {color}" for color in right), chosen, rejected)

    def _further(self, number: int) -> int:
        """How far the wrong colour is; it changes from round to round, so that every other is rejected in turn."""
        count = len(self.plain.colors)
        return 1 + number // count % (count - 1)

    def first(self, count: int) -> PromptBatch:
        return PromptBatch(tuple(f"a {self.plain.color(i)}" for i in range(count)), ({},) * count)


@dataclass(frozen=True)
class ToyPairs:
    """Plain pictures of the right colour, preferred to those of a wrong one; from another `start` on, held out."""

    colors: tuple[str, ...] = ("red", "green", "blue", "grey")
    frames: int = 1
    count: int = 256
    start: int = 0
    spread: float = 0.05
    yields: ClassVar[type] = Pairs

    def __post_init__(self) -> None:
        Plain(self.colors, self.frames, self.spread)
        counted(self.count, self.start)
        if len(set(self.colors)) != len(self.colors) or len(self.colors) < 2:
            raise ValueError(f"'colors' is {', '.join(self.colors)}; expected two or more that differ")

    def load(self, seed: int) -> PlainPairs:
        return PlainPairs(Plain(self.colors, self.frames, self.spread), self.start, self.count, seed)


@dataclass(frozen=True)
class PairRows:
    """Pairs on disk, decoded when their turn comes."""

    prompts: tuple[str, ...]
    files: tuple[tuple[Path, Path], ...]  # chosen, rejected
    places: tuple[str, ...]  # where each pair is written, for messages
    size: int | None
    seed: int

    def __len__(self) -> int:
        return len(self.files)

    def batch(self, step: int, size: int, rank: int, world: int) -> Pairs:
        chosen = rows(len(self), self.seed, step, size, rank, world)
        files = [file for i in chosen for file in self.files[i]]
        names = [f"{self.places[i]}: {file.name}" for i in chosen for file in self.files[i]]
        pixels = stacked([squared(read_picture(file), self.size) for file in files], names)
        return Pairs(tuple(self.prompts[i] for i in chosen), pixels[0::2], pixels[1::2])

    def first(self, count: int) -> PromptBatch:
        return PromptBatch(tuple(self.prompts[i % len(self)] for i in range(count)), ({},) * count)


@dataclass(frozen=True)
class PairFile:
    """A JSONL file of rows {prompt, chosen, rejected}; the pictures' paths are relative to it."""

    path: Path
    size: int | None = None  # pixels a side, cut from the middle; as they are if not given
    yields: ClassVar[type] = Pairs

    def __post_init__(self) -> None:
        sided(self.size)

    def load(self, seed: int) -> PairRows:
        found = json_rows(self.path)
        places = tuple(f"{self.path}, line {number}" for number, _ in found)
        prompts = tuple(field(self.path, number, row, "prompt") for number, row in found)
        files = tuple(
            tuple(
                existing(self.path.parent / field(self.path, number, row, side), place)
                for side in ("chosen", "rejected")
            )
            for (number, row), place in zip(found, places, strict=True)
        )
        return PairRows(prompts, files, places, self.size, seed)  # type: ignore[arg-type]  # two files a row
