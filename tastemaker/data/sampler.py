"""Which rows a step takes: a function of seed and step alone, so that resuming and sharding change nothing."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from ..core.randomness import Randomness


@lru_cache(maxsize=8)
def epoch_permutation(length: int, seed: int, epoch: int) -> Tensor:
    """All rows in the order of one epoch: [length]."""
    words = Randomness(seed, epoch, torch.arange(length)).words("order", 2)
    return (words[:, 0] << 31 ^ words[:, 1]).argsort(stable=True)


def batch_indices(length: int, seed: int, step: int, size: int, rank: int, world: int) -> list[int]:
    """A rank's contiguous share of the rows of a step; the shares of all ranks, in order, are the rows of one."""
    start = step * size
    place, end = start + rank * size // world, start + (rank + 1) * size // world
    found: list[int] = []
    while place < end:
        epoch, first = divmod(place, length)
        last = min(first + end - place, length)
        found += epoch_permutation(length, seed, epoch)[first:last].tolist()
        place += last - first
    return found
