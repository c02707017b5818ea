"""Pictures with their classes, which a model told classes learns from; what cannot be read is named and skipped."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Annotated, ClassVar, Literal, Protocol

import torch
from pydantic import Field, NonNegativeInt
from torch import Tensor

from ..core.randomness import Randomness
from ..core.registry import ConfigError
from ..core.types import ImageBatch, PromptBatch
from .class_labels import imagenet_labels, wordnet_class_ids
from .crops import center_crop, random_crop
from .hf_datasets import is_saved, load_labeled_images
from .image_io import read_image
from .labeled_images import ClassFolder, list_class_folders, open_class_folder
from .prefetch import BatchShard, Prefetcher
from .sampler import batch_indices

ClassCaption = Literal["name", "number"]
Crop = Literal["middle", "random"]
LabeledCrop = tuple[str, Tensor]  # what is said of a picture, and its square
WORKERS = 4  # threads that read and cut the next steps' pictures
READ_ERRORS = (OSError, ValueError, KeyError, TypeError, IndexError, EOFError)


class ClassImageSource(Protocol):
    """Pictures and their classes by number; asking for one that is broken raises."""

    @property
    def names(self) -> Sequence[str]:
        """Of the classes, in order; none if they are numbers alone."""

    def __len__(self) -> int: ...
    def name(self, number: int) -> str: ...
    def label(self, number: int) -> int: ...
    def picture(self, number: int) -> Tensor: ...


@dataclass(frozen=True)
class ClassFolders:
    """A folder for each class, by whose names they are numbered."""

    found: ClassFolder
    names: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.found)

    def name(self, number: int) -> str:
        return str(self.found.files[number])

    def label(self, number: int) -> int:
        return self.found.label(number)

    def picture(self, number: int) -> Tensor:
        return read_image(self.found.files[number])[0]


@dataclass
class SkippedExamples:
    """Rows that cannot be used, and how many of them are borne."""

    most: int
    why: dict[int, str] = field(default_factory=dict)  # by number

    def add(self, number: int, name: str, error: Exception) -> None:
        if number in self.why:  # another thread came upon it as well
            return
        self.why[number] = name
        reason = " ".join(str(error).split()) or type(error).__name__
        if len(self.why) > self.most:
            before = f", and {len(self.why) - 1} rows before it were skipped" if len(self.why) > 1 else ""
            raise ConfigError(
                f"data: {name} cannot be used ({reason:.200}){before}; mend it, or set data.skip above {self.most}"
            ) from error
        warnings.warn(f"data: {name} is skipped ({reason:.200}); {len(self.why)} of {self.most}", stacklevel=2)


@dataclass(frozen=True)
class ClassImageDataset:
    """Pictures in an order of the seed's; in the place of one that is broken comes the next that is not."""

    source: ClassImageSource
    prompts: tuple[str, ...]  # by class; numbers if none
    size: int
    seed: int
    skipped: SkippedExamples
    crop: Crop = "middle"
    mirror: bool = False

    def __len__(self) -> int:
        return len(self.source)

    @cached_property
    def ahead(self) -> Prefetcher[LabeledCrop, ImageBatch]:
        return Prefetcher(self._jobs, _joined, WORKERS)

    def batch(self, step: int, size: int, rank: int, world: int) -> ImageBatch:
        return self.ahead.take(BatchShard(step, size, rank, world))

    def _jobs(self, share: BatchShard) -> list[Callable[[], LabeledCrop]]:
        chosen = batch_indices(len(self), self.seed, share.step, share.size, share.rank, share.world)
        first = share.rank * share.size // share.world
        chance = Randomness(self.seed, share.step, torch.arange(first, first + len(chosen))).uniform("crop", 4)
        return [partial(self._usable, number, own) for number, own in zip(chosen, chance, strict=True)]

    def _usable(self, number: int, chance: Tensor) -> LabeledCrop:
        for further in range(len(self)):
            place = (number + further) % len(self)
            if place in self.skipped.why:
                continue
            try:
                return self.prompt(self.source.label(place)), self._cut(self.source.picture(place), chance)
            except READ_ERRORS as error:
                self.skipped.add(place, self.source.name(place), error)
        raise ConfigError(f"data: none of the {len(self)} rows can be used; check what they name")

    def _cut(self, pixels: Tensor, chance: Tensor) -> Tensor:
        square = center_crop(pixels, self.size) if self.crop == "middle" else random_crop(pixels, self.size, chance[:3])
        return square.flip(-1) if self.mirror and float(chance[3]) < 0.5 else square

    def prompt(self, label: int) -> str:
        return self.prompts[label] if self.prompts else str(label)

    def first(self, count: int) -> PromptBatch:
        known = self.prompts or self._seen()
        return PromptBatch(tuple(known[i % len(known)] for i in range(count)), ({},) * count)

    def _seen(self, most: int = 64) -> tuple[str, ...]:
        """What is said of the first rows, where the classes have no names."""
        found = set()
        for number in range(min(len(self), most)):
            with suppress(*READ_ERRORS):  # which is told of when its turn comes
                found.add(self.source.label(number))
        return tuple(map(str, sorted(found))) or ("0",)


def _joined(found: Sequence[LabeledCrop]) -> ImageBatch:
    return ImageBatch(tuple(prompt for prompt, _ in found), torch.stack([picture for _, picture in found])[:, None])


@dataclass(frozen=True)
class ClassPictures:
    """Pictures with their classes: a folder for each, or what `datasets` saved to disk; a square of each."""

    path: Path
    size: Annotated[int, Field(ge=8, le=16384)] = 256  # pixels a side
    split: str = "train"  # of what `datasets` saved
    say: ClassCaption = "name"  # of a class; models without names are told numbers
    crop: Crop = "middle"  # random: four fifths of the shorter side or more, anywhere, as tokenizers are trained
    mirror: bool = False  # every other picture the other way round, by chance
    skip: NonNegativeInt = 0  # rows that cannot be used and are passed over, on each rank; one more is an error
    yields: ClassVar[type] = ImageBatch

    def load(self, seed: int) -> ClassImageDataset:
        source: ClassImageSource = (
            load_labeled_images(self.path, self.split) if is_saved(self.path) else folders(self.path)
        )
        if not len(source):
            raise ConfigError(f"data: {self.path} has no rows; expected at least one picture")
        skipped = SkippedExamples(self.skip)
        return ClassImageDataset(
            source, class_captions(source.names, self.say), self.size, seed, skipped, self.crop, self.mirror
        )


def folders(path: Path) -> ClassFolders:
    found = open_class_folder(path)
    return ClassFolders(found, tuple(folder.name for folder in list_class_folders(path)) or ("0",))


def class_captions(names: Sequence[str], say: ClassCaption) -> tuple[str, ...]:
    """What is said of each class: by ImageNet's names and numbers, where the classes are ImageNet's."""
    ids = wordnet_class_ids()
    if len(names) == 1000 or (names and all(name in ids for name in names)):
        numbers = [ids.get(name, place) for place, name in enumerate(names)]
        return tuple(imagenet_labels().name(number) if say == "name" else str(number) for number in numbers)
    plain = tuple(name.replace("_", " ") for name in names)
    return plain if say == "name" else tuple(map(str, range(len(plain))))
