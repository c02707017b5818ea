"""Endless data made finite: after so many rows the same come again, each time in another order, from memory."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from ..core.types import ImageBatch, PromptBatch, concatenate
from .sampler import epoch_permutation
from .spec import Dataset

CHUNK = 4096  # rows made at a time


@dataclass(frozen=True)
class FinitePool:
    """The first pass makes rows as they are asked for; what comes again is kept as bytes where it was made."""

    source: Dataset
    count: int
    seed: int

    def __len__(self) -> int:
        return self.count

    @cached_property
    def kept(self) -> ImageBatch:
        """All rows, pixels as bytes."""
        size = min(CHUNK, self.count)
        chunks = [self.source.batch(i, size, 0, 1) for i in range(-(-self.count // size))]
        return concatenate([ImageBatch(c.prompts, to_uint8(c.pixels)) for c in chunks])

    def batch(self, step: int, size: int, rank: int, world: int) -> ImageBatch:
        start = step * size
        if start + size <= self.count:
            found: ImageBatch = self.source.batch(step, size, rank, world)
            return found
        numbers = self.numbers(torch.arange(start + rank * size // world, start + (rank + 1) * size // world))
        pixels = self.kept.pixels[numbers.to(self.kept.pixels.device)].float() / 255
        return ImageBatch(tuple(self.kept.prompts[i] for i in numbers.tolist()), pixels, numbers)

    def numbers(self, places: Tensor) -> Tensor:
        """Which rows come at these places of the endless order; no row twice in one pass."""
        passes = places // self.count
        found = places % self.count
        for number in sorted(set(passes.tolist())):
            here = passes == number
            found[here] = epoch_permutation(self.count, self.seed, number)[found[here]] if number else found[here]
        return found

    def first(self, count: int) -> PromptBatch:
        return self.source.first(count)


def to_uint8(pixels: Tensor) -> Tensor:
    return (pixels * 255).round().clamp(0, 255).to(torch.uint8)
