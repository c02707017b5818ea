"""Two pictures of each prompt, the first preferred."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from ..core.registry import ConfigError
from ..core.types import PreferenceBatch, PromptBatch
from .captioned_images import (
    FORMATS,
    PictureFolder,
    SolidColorImages,
    center_square,
    check_count,
    check_size,
    stack_images,
)
from .image_io import read_image
from .mixture import FileRow, read_mixture
from .prompts import check_exists
from .sampler import batch_indices
from .text_files import read_lines


@dataclass(frozen=True)
class ToyPairDataset:
    plain: SolidColorImages
    first_number: int
    count: int
    seed: int

    def __len__(self) -> int:
        return self.count

    def batch(self, step: int, size: int, rank: int, world: int) -> PreferenceBatch:
        numbers = [self.first_number + row for row in batch_indices(len(self), self.seed, step, size, rank, world)]
        right = [self.plain.color(number) for number in numbers]
        wrong = [self.plain.color(number, self._further(number)) for number in numbers]
        chosen, rejected = self.plain.pictures(numbers, right), self.plain.pictures(numbers, wrong, "rejected")
        return PreferenceBatch(tuple(f"a {color}" for color in right), chosen, rejected)

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
    yields: ClassVar[type] = PreferenceBatch

    def __post_init__(self) -> None:
        SolidColorImages(self.colors, self.frames, self.spread)
        check_count(self.count, self.start)
        if len(set(self.colors)) != len(self.colors) or len(self.colors) < 2:
            raise ValueError(f"'colors' is {', '.join(self.colors)}; expected two or more that differ")

    def load(self, seed: int) -> ToyPairDataset:
        return ToyPairDataset(SolidColorImages(self.colors, self.frames, self.spread), self.start, self.count, seed)


@dataclass(frozen=True)
class PairDataset:
    """Pairs on disk, decoded when their turn comes."""

    prompts: tuple[str, ...]
    files: tuple[tuple[Path, Path], ...]  # chosen, rejected
    places: tuple[str, ...]  # where each pair is written, for messages
    size: int | None
    seed: int

    def __len__(self) -> int:
        return len(self.files)

    def batch(self, step: int, size: int, rank: int, world: int) -> PreferenceBatch:
        chosen = batch_indices(len(self), self.seed, step, size, rank, world)
        files = [file for i in chosen for file in self.files[i]]
        names = [f"{self.places[i]}: {file.name}" for i in chosen for file in self.files[i]]
        pixels = stack_images([center_square(read_image(file), self.size) for file in files], names)
        return PreferenceBatch(tuple(self.prompts[i] for i in chosen), pixels[0::2], pixels[1::2])

    def first(self, count: int) -> PromptBatch:
        return PromptBatch(tuple(self.prompts[i % len(self)] for i in range(count)), ({},) * count)


@dataclass(frozen=True)
class PairFile:
    """Rows {prompt, chosen, rejected} of a .jsonl, a .json list, or a .yaml that mixes such files as LLaVA's do."""

    path: Path | None = None  # a few small pictures to try a recipe with, each against another's, if not given
    images: Path | None = None  # the folder the pictures' paths begin in; that of the file that names them if not given
    size: int | None = None  # pixels a side, cut from the middle; as they are if not given
    yields: ClassVar[type] = PreferenceBatch

    def __post_init__(self) -> None:
        check_size(self.size)

    def load(self, seed: int) -> PairDataset:
        if self.path is None:
            return self._examples(seed)
        found = read_mixture(self.path, seed)
        files = tuple((self._picture(line, "chosen"), self._picture(line, "rejected")) for line in found)
        prompts = tuple(line.text("prompt") for line in found)
        return PairDataset(prompts, files, tuple(line.place for line in found), self.size, seed)

    def _examples(self, seed: int) -> PairDataset:
        right = PictureFolder().load(seed)
        wrong = (*right.files[1:], right.files[0])
        places = tuple(str(file.parent) for file in right.files)
        return PairDataset(right.prompts, tuple(zip(right.files, wrong, strict=True)), places, self.size, seed)

    def _picture(self, line: FileRow, side: str) -> Path:
        return check_exists((self.images or line.file.parent) / line.text(side), line.place)


@dataclass(frozen=True)
class PairFolder:
    """Pictures of the same names in the folders `chosen` and `rejected`, and the prompt of each in NAME.txt above."""

    path: Path
    size: int | None = None  # pixels a side, cut from the middle; as they are if not given
    yields: ClassVar[type] = PreferenceBatch

    def __post_init__(self) -> None:
        check_size(self.size)

    def load(self, seed: int) -> PairDataset:
        chosen, rejected = (self._named(side) for side in ("chosen", "rejected"))
        lonely = sorted(chosen.keys() ^ rejected.keys())
        if lonely:
            side = "rejected" if lonely[0] in chosen else "chosen"
            raise ConfigError(f"{self.path}: '{lonely[0]}' has no picture in {side}; expected one of each, or neither")
        prompts = [check_exists(self.path / f"{name}.txt", f"the prompt of {chosen[name]}") for name in chosen]
        texts = tuple(" ".join(line for _, line in read_lines(prompt)) for prompt in prompts)
        files = tuple((chosen[name], rejected[name]) for name in chosen)
        return PairDataset(texts, files, tuple(f"{self.path}, '{name}'" for name in chosen), self.size, seed)

    def _named(self, side: str) -> dict[str, Path]:
        folder = self.path / side
        if not folder.is_dir():
            raise ConfigError(f"{folder}: there is no such folder; expected one of chosen and one of rejected pictures")
        found = {file.stem: file for file in sorted(folder.iterdir()) if file.suffix.lower() in FORMATS}
        if not found:
            raise ConfigError(f"{folder}: there are no pictures; expected files that end in {', '.join(FORMATS)}")
        return found
