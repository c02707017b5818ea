"""A finite set of rows in two parts: one to learn from, and one that is held out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from ..core.registry import ConfigError
from ..core.types import PromptBatch, concatenate
from .sampler import batch_indices
from .spec import Dataset

ENDLESS = 2**28  # rows that no pictures on disk are as many as


@dataclass(frozen=True)
class DatasetSlice:
    """Some of the rows of another set, in an order of its own."""

    source: Dataset
    start: int  # in the order of the source's first pass
    count: int
    seed: int

    def __len__(self) -> int:
        return self.count

    def batch(self, step: int, size: int, rank: int, world: int) -> Any:
        places = batch_indices(self.count, self.seed, step, size, rank, world)
        # A step of one row is the row at that place of the first pass, whatever the set is.
        return concatenate([self.source.batch(self.start + place, 1, 0, 1) for place in places])

    def first(self, count: int) -> PromptBatch:
        return self.source.first(count)


@runtime_checkable
class Splittable(Protocol):
    """A set that knows better how to be divided than row by row."""

    def parts(self, held: int, seed: int) -> tuple[Dataset, Dataset]:
        """What to learn from, and so many rows that are held out: the first of the first pass."""


def split_dataset(source: Dataset, share: float, seed: int) -> tuple[Dataset, Dataset]:
    """What to learn from, and the share that is held out."""
    if len(source) > ENDLESS:
        raise ConfigError("validation.share: the data never ends, so no part of it is a share; set validation.data")
    held = max(1, round(len(source) * share))
    if held >= len(source):
        raise ConfigError(
            f"validation.share: {share:g} of {len(source)} rows is {held}, which leaves none to learn from; set it "
            "lower, give more rows, or set validation.every=0"
        )
    if isinstance(source, Splittable):
        return source.parts(held, seed)
    return DatasetSlice(source, held, len(source) - held, seed), DatasetSlice(source, 0, held, seed)
