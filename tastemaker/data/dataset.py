"""The interface of data sets, the order of their samples, and views on them: splits and finite pools.

A batch is a pure function of the step, so a run resumes by knowing its step, and the shards of all ranks, in order,
are the batch of a single process.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, Protocol

import torch
from torch import Tensor

from ..core.randomness import Purpose, Randomness
from ..core.registry import ConfigError
from ..core.types import ImageBatch, PromptBatch, concatenate

MAX_FINITE_LENGTH = 2**28  # a longer data set is generated without end
POOL_CHUNK = 4096  # samples generated per call


@lru_cache(maxsize=8)
def epoch_permutation(length: int, seed: int, epoch: int) -> Tensor:
    """The order of all samples in an epoch: [length]."""
    words = Randomness(seed, epoch, torch.arange(length)).words(Purpose.DATA_ORDER, 2)
    return (words[:, 0] << 31 ^ words[:, 1]).argsort(stable=True)


def rank_range(step: int, batch_size: int, rank: int, world_size: int) -> range:
    """The positions of a rank's samples of a step, counted over all steps."""
    start = step * batch_size
    return range(start + rank * batch_size // world_size, start + (rank + 1) * batch_size // world_size)


def batch_indices(length: int, seed: int, step: int, batch_size: int, rank: int, world_size: int) -> list[int]:
    """Indices of a rank's samples of a step, from a data set of `length` samples in a new order every epoch."""
    positions = rank_range(step, batch_size, rank, world_size)
    position, indices = positions.start, list[int]()
    while position < positions.stop:
        epoch, first = divmod(position, length)
        last = min(first + positions.stop - position, length)
        indices += epoch_permutation(length, seed, epoch)[first:last].tolist()
        position += last - first
    return indices


class Dataset(ABC):
    """Samples in an order that depends on seed and step alone."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def batch(self, step: int, batch_size: int, rank: int, world_size: int) -> Any:
        """This rank's shard of the `batch_size` samples of a step, as the spec's `batch_type`."""

    @abstractmethod
    def first_prompts(self, count: int) -> PromptBatch:
        """Prompts to display, the same at every call; repeated if there are fewer than `count`."""

    def split(self, held_out: int, seed: int) -> tuple[Dataset, Dataset]:
        """A training set, and the first `held_out` samples of the first epoch as a validation set."""
        return DatasetSlice(self, held_out, len(self) - held_out, seed), DatasetSlice(self, 0, held_out, seed)


class DataSpec(Protocol):
    """The configuration of a data set."""

    @property
    def batch_type(self) -> type:
        """PromptBatch, ImageBatch, TokenBatch, LatentBatch, PreferenceBatch, LikeBatch or QuestionAnswerBatch."""

    def load(self, seed: int) -> Dataset: ...


class ShuffledDataset(Dataset):
    """Samples by index, in a new order every epoch."""

    prompts: tuple[str, ...]  # to display; one per sample, unless `__len__` is overridden
    seed: int

    def __len__(self) -> int:
        return len(self.prompts)

    def batch(self, step: int, batch_size: int, rank: int, world_size: int) -> Any:
        return self.collate(batch_indices(len(self), self.seed, step, batch_size, rank, world_size))

    @abstractmethod
    def collate(self, indices: list[int]) -> Any:
        """The batch of some samples."""

    def first_prompts(self, count: int) -> PromptBatch:
        return repeat_prompts(self.prompts, count)


def repeat_prompts(prompts: Sequence[str], count: int) -> PromptBatch:
    """The first `count` prompts without metadata, starting over if there are fewer."""
    return PromptBatch(tuple(prompts[i % len(prompts)] for i in range(count)), ({},) * count)


@dataclass(frozen=True)
class DatasetSlice(Dataset):
    """Consecutive samples of another data set's first epoch, shuffled by a seed of their own."""

    source: Dataset
    start: int  # position in the source's first epoch
    length: int
    seed: int

    def __len__(self) -> int:
        return self.length

    def batch(self, step: int, batch_size: int, rank: int, world_size: int) -> Any:
        indices = batch_indices(self.length, self.seed, step, batch_size, rank, world_size)
        # With a batch size of 1, step k of any data set is the sample at position k of its first epoch.
        return concatenate([self.source.batch(self.start + index, 1, 0, 1) for index in indices])

    def first_prompts(self, count: int) -> PromptBatch:
        return self.source.first_prompts(count)


def split_dataset(source: Dataset, fraction: float, seed: int) -> tuple[Dataset, Dataset]:
    """Split a finite data set into a training set and a validation set with `fraction` of the samples."""
    if len(source) > MAX_FINITE_LENGTH:
        raise ConfigError(
            "validation.split: this data is generated without an end and cannot be split; set validation.data to a "
            "second data set [TM134]"
        )
    held_out = max(1, round(len(source) * fraction))
    if held_out >= len(source):
        raise ConfigError(
            f"validation.split: {fraction:g} of {len(source)} samples is {held_out}, so no samples are left to "
            "train on; lower validation.split, add more samples, or set validation.every=0 [TM135]"
        )
    return source.split(held_out, seed)


@dataclass(frozen=True)
class FinitePool(Dataset):
    """The first `length` samples of an endless image data set, in a new order every epoch.

    The first epoch comes from the source as it is; later epochs come from memory, where pixels are kept as uint8 on
    the device that generated them.
    """

    source: Dataset
    length: int
    seed: int

    def __len__(self) -> int:
        return self.length

    @cached_property
    def cache(self) -> ImageBatch:
        """All samples, with pixels as uint8."""
        size = min(POOL_CHUNK, self.length)
        chunks = [self.source.batch(i, size, 0, 1) for i in range(-(-self.length // size))]
        return concatenate(
            [ImageBatch(c.prompts, (c.pixels * 255).round().clamp(0, 255).to(torch.uint8)) for c in chunks]
        )

    def batch(self, step: int, batch_size: int, rank: int, world_size: int) -> ImageBatch:
        if (step + 1) * batch_size <= self.length:
            batch: ImageBatch = self.source.batch(step, batch_size, rank, world_size)
            return batch
        positions = rank_range(step, batch_size, rank, world_size)
        image_ids = self.image_ids(torch.arange(positions.start, positions.stop))
        pixels = self.cache.pixels[image_ids.to(self.cache.pixels.device)].float() / 255
        return ImageBatch(tuple(self.cache.prompts[i] for i in image_ids.tolist()), pixels, image_ids)

    def image_ids(self, positions: Tensor) -> Tensor:
        """Which samples come at these positions, counted over all epochs: [B]."""
        epochs, image_ids = positions // self.length, positions % self.length
        for epoch in sorted(set(epochs.tolist()) - {0}):  # the first epoch is in the order of the source
            selected = epochs == epoch
            image_ids[selected] = epoch_permutation(self.length, self.seed, epoch)[image_ids[selected]]
        return image_ids

    def first_prompts(self, count: int) -> PromptBatch:
        return self.source.first_prompts(count)
