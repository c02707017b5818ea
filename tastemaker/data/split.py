"""A finite set of rows in two parts: one to learn from, and one that is held out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..registry import ConfigError
from ..types import PromptBatch, concatenate
from .order import rows
from .spec import Dataset


@dataclass(frozen=True)
class Part:
    """Some of the rows of another set, in an order of its own."""

    source: Dataset
    start: int  # in the order of the source's first pass
    count: int
    seed: int

    def __len__(self) -> int:
        return self.count

    def batch(self, step: int, size: int, rank: int, world: int) -> Any:
        places = rows(self.count, self.seed, step, size, rank, world)
        # A step of one row is the row at that place of the first pass, whatever the set is.
        return concatenate([self.source.batch(self.start + place, 1, 0, 1) for place in places])

    def first(self, count: int) -> PromptBatch:
        return self.source.first(count)


def split(source: Dataset, share: float, seed: int) -> tuple[Part, Part]:
    """What to learn from, and the share that is held out."""
    held = round(len(source) * share)
    if not 0 < held < len(source):
        raise ConfigError(
            f"validation.share: {share:g} of {len(source)} rows is {held}; expected at least one and not all of them"
        )
    return Part(source, held, len(source) - held, seed), Part(source, 0, held, seed)
