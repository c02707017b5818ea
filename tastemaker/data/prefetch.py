"""Prefetch the batches of the next steps with threads."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any, ClassVar, Generic, TypeVar

import torch
from torch import Tensor

from ..core.types import PromptBatch
from .dataset import Dataset, batch_indices, rank_range, repeat_prompts

T = TypeVar("T")
B = TypeVar("B")
MAX_PINNED_BYTES = 2**28  # per tensor


@dataclass(frozen=True)
class BatchShard:
    """A rank's samples of a step."""

    step: int
    batch_size: int
    rank: int
    world_size: int

    @property
    def positions(self) -> range:
        """The positions of its samples, counted over all steps."""
        return rank_range(self.step, self.batch_size, self.rank, self.world_size)

    @property
    def rows(self) -> Tensor:
        """The positions of its samples within the step's batch over all ranks: [B]."""
        positions, start = self.positions, self.step * self.batch_size
        return torch.arange(positions.start - start, positions.stop - start)

    def indices(self, length: int, seed: int) -> list[int]:
        """Indices of its samples, from a data set of `length` samples in a new order every epoch."""
        return batch_indices(length, seed, self.step, self.batch_size, self.rank, self.world_size)


LoadJobs = Sequence[Callable[[], T]]


@dataclass
class Prefetcher(Generic[T, B]):
    """Loads the batches of the next steps in threads, once two consecutive steps were asked for.

    What a batch holds is a function of its shard, so results do not depend on threads. Threads suffice because
    decoding and copying release the GIL. A request out of sequence (a preview, a validation batch) leaves the
    prefetched batches of other shards alone.
    """

    jobs: Callable[[BatchShard], LoadJobs[T]]  # each loads one sample or several
    collate: Callable[[Sequence[T]], B]
    num_workers: int  # threads; 0 loads samples when they are asked for
    prefetch_factor: int = 2  # steps loaded in advance
    pending: dict[BatchShard, Future[B]] = field(default_factory=dict)
    last_step: dict[BatchShard, int] = field(default_factory=dict)  # by shard with step 0

    @cached_property
    def workers(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(self.num_workers, "samples")

    @cached_property
    def collator(self) -> ThreadPoolExecutor:
        """One thread that collates batches. It waits for the workers, so it cannot be one of them."""
        if not cuda_in_use():
            return ThreadPoolExecutor(1, "batches")
        # A new thread starts on GPU 0 and would allocate memory there that belongs to another rank.
        device = torch.cuda.current_device()
        return ThreadPoolExecutor(1, "batches", initializer=torch.cuda.set_device, initargs=(device,))

    def get(self, shard: BatchShard) -> B:
        """The batch of a shard; schedules the next steps if the shard follows the last one."""
        if not self.num_workers:
            return self.collate([job() for job in self.jobs(shard)])
        prefetched = self.pending.pop(shard, None)
        samples = self._submit(shard) if prefetched is None else []
        key = replace(shard, step=0)
        consecutive, self.last_step[key] = self.last_step.get(key) == shard.step - 1, shard.step
        ahead = range(1, self.prefetch_factor + 1) if consecutive else range(0)
        upcoming = [replace(shard, step=shard.step + k) for k in ahead]
        for other in [other for other in self.pending if replace(other, step=0) == key and other not in upcoming]:
            self.pending.pop(other).cancel()
        for next_shard in upcoming:
            if next_shard not in self.pending:
                self.pending[next_shard] = self.collator.submit(self._load, next_shard)
        return self.collate([sample.result() for sample in samples]) if prefetched is None else prefetched.result()

    def _submit(self, shard: BatchShard) -> list[Future[T]]:
        return [self.workers.submit(job) for job in self.jobs(shard)]

    def _load(self, shard: BatchShard) -> B:
        return pin_batch(self.collate([sample.result() for sample in self._submit(shard)]))


def cuda_in_use() -> bool:
    """Whether this process has initialized CUDA; a GPU that is present but unused gets no pinned memory."""
    return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]


def batch_prefetcher(load_batch: Callable[[BatchShard], B], prefetch_factor: int = 2) -> Prefetcher[B, B]:
    """A prefetcher whose only job per step loads the complete batch."""
    return Prefetcher(lambda shard: [lambda: load_batch(shard)], lambda batches: batches[0], 1, prefetch_factor)


class PrefetchedDataset(Dataset):
    """A data set whose next batches are loaded in a thread."""

    prompts: tuple[str, ...]  # to display
    prefetch_factor: ClassVar[int] = 2  # steps loaded in advance

    @cached_property
    def prefetcher(self) -> Prefetcher[Any, Any]:
        return batch_prefetcher(self.load_shard, self.prefetch_factor)

    def batch(self, step: int, batch_size: int, rank: int, world_size: int) -> Any:
        return self.prefetcher.get(BatchShard(step, batch_size, rank, world_size))

    @abstractmethod
    def load_shard(self, shard: BatchShard) -> Any:
        """The batch of a shard."""

    def first_prompts(self, count: int) -> PromptBatch:
        return repeat_prompts(self.prompts, count)


def pin_batch(batch: B) -> B:
    """The batch with its CPU tensors in pinned memory if CUDA is in use."""
    if not cuda_in_use():
        return batch
    tree: Any = batch
    values = {f.name: getattr(tree, f.name) for f in fields(tree)}
    pinned = {
        name: x.pin_memory()
        for name, x in values.items()
        if isinstance(x, Tensor) and x.device.type == "cpu" and x.nbytes <= MAX_PINNED_BYTES
    }
    return replace(tree, **pinned)  # type: ignore[no-any-return]
