"""Tokens of pictures, encoded beforehand: folders of `.npy` files as LlamaGen and `tastemaker encode` write them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field, NonNegativeInt
from torch import Tensor

from ..core.randomness import Randomness
from ..core.registry import ConfigError
from ..core.types import PromptBatch, TokenBatch
from .class_images import READ_ERRORS, ClassCaption, SkippedExamples
from .class_labels import make_class_labels
from .prefetch import BatchShard, Prefetcher, whole_batch_prefetcher
from .sampler import batch_indices

CODES, LABELS = "codes", "labels"  # how the names of both folders end
CLOSER = "_105"  # what LlamaGen adds to the name of a folder of the same pictures, cut more closely


@dataclass(frozen=True)
class TokenDataset:
    """Files in an order of the seed's, one of each file's views by chance; broken ones are passed over."""

    places: tuple[tuple[Path, Path], ...]  # folders of codes and of labels; of several, one by chance
    numbers: tuple[int, ...]  # of the files
    prompts: tuple[str, ...]  # by class
    seed: int
    skipped: SkippedExamples

    def __len__(self) -> int:
        return len(self.numbers)

    @cached_property
    def ahead(self) -> Prefetcher[TokenBatch, TokenBatch]:
        return whole_batch_prefetcher(self._made)

    def batch(self, step: int, size: int, rank: int, world: int) -> TokenBatch:
        return self.ahead.take(BatchShard(step, size, rank, world))

    def _made(self, share: BatchShard) -> TokenBatch:
        step, size, rank, world = share.step, share.size, share.rank, share.world
        mine = torch.arange(rank * size // world, (rank + 1) * size // world)
        chances = Randomness(self.seed, step, mine).uniform("view", 2)
        chosen = batch_indices(len(self), self.seed, step, size, rank, world)
        found = [self._usable(row, *chance) for row, chance in zip(chosen, chances.tolist(), strict=True)]
        lengths = {len(ids) for _, ids in found}
        if len(lengths) > 1:
            raise ConfigError(f"data: files hold {', '.join(map(str, sorted(lengths)))} tokens; encode all at one size")
        return TokenBatch(tuple(prompt for prompt, _ in found), torch.stack([ids for _, ids in found]))

    def _usable(self, row: int, where: float, which: float) -> tuple[str, Tensor]:
        codes, labels = self.places[int(where * len(self.places))]
        for further in range(len(self)):
            place = (row + further) % len(self)
            if place in self.skipped.why:
                continue
            file = f"{self.numbers[place]}.npy"
            try:
                views, label = read_npy(codes / file), read_npy(labels / file)
                ids = views.reshape(-1, views.shape[-1])
                return self._prompt(int(label.reshape(-1)[0])), torch.from_numpy(
                    ids[int(which * len(ids))].astype("<i8")
                )
            except READ_ERRORS as error:
                self.skipped.add(place, str(codes / file), error)
        raise ConfigError(f"data: none of the {len(self)} files in {codes} can be used; encode the pictures again")

    def _prompt(self, label: int) -> str:
        if not 0 <= label < len(self.prompts):
            raise ValueError(f"its class is {label}, and there are {len(self.prompts)}")
        return self.prompts[label]

    def first(self, count: int) -> PromptBatch:
        return PromptBatch(tuple(self.prompts[i % len(self.prompts)] for i in range(count)), ({},) * count)


@dataclass(frozen=True)
class CodeFolder:
    """Tokens in `<name>_codes/<number>.npy`, [1, views, tokens], and classes in `<name>_labels/<number>.npy`."""

    path: Path  # the folder that holds both; of a sibling whose name ends in _105, every other row is taken
    classes: Annotated[int, Field(ge=1, le=10**6)] = 1000
    names: tuple[str, ...] = ()  # of the classes, in order; a thousand without are ImageNet's
    say: ClassCaption = "name"  # of a class; models without names are told numbers
    skip: NonNegativeInt = 0  # files that cannot be used and are passed over, on each rank; one more is an error
    yields: ClassVar[type] = TokenBatch

    def __post_init__(self) -> None:
        make_class_labels(self.classes, self.names)

    def load(self, seed: int) -> TokenDataset:
        known = make_class_labels(self.classes, self.names)
        prompts = tuple(known.name(i) if self.say == "name" else str(i) for i in range(self.classes))
        both = [self.path, self.path.with_name(self.path.name + CLOSER)]
        places = tuple(code_and_label_folders(path) for path in both if path is self.path or path.is_dir())
        numbers = tuple(sorted(int(file.stem) for file in places[0][0].glob("*.npy") if file.stem.isdecimal()))
        if not numbers:
            raise ConfigError(f"{places[0][0]} holds no files such as 0.npy; write some with `tastemaker encode`")
        return TokenDataset(places, numbers, prompts, seed, SkippedExamples(self.skip))


def code_and_label_folders(path: Path) -> tuple[Path, Path]:
    """The folders of codes and of labels in another."""
    if not path.is_dir():
        raise ConfigError(f"{path}: there is no such folder; check the path")
    found = [sorted(folder for folder in path.glob(f"*{end}") if folder.is_dir()) for end in (CODES, LABELS)]
    if [len(folders) for folders in found] != [1, 1]:
        raise ConfigError(
            f"{path} holds {len(found[0])} folders of codes and {len(found[1])} of labels; expected one of each, "
            f"as imagenet256_{CODES} and imagenet256_{LABELS}"
        )
    return found[0][0], found[1][0]


def read_npy(path: Path) -> NDArray[np.int64]:
    """The whole numbers in a file, nothing of which is run."""
    values = np.load(path, allow_pickle=False)
    if not np.issubdtype(values.dtype, np.integer) or not values.size or values.min() < 0:
        raise ValueError(f"it holds {values.dtype} of shape {list(values.shape)}, expected whole numbers from 0 on")
    found: NDArray[np.int64] = values
    return found
