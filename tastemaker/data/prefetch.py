"""Prefetch batches of the next steps with threads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")
B = TypeVar("B")
MOST = 2**28  # bytes of a tensor that is kept from being moved, so that a GPU can fetch it by itself


@dataclass(frozen=True)
class BatchShard:
    """A rank's rows of a step."""

    step: int
    size: int
    rank: int
    world: int

    @property
    def range(self) -> range:
        """Their places among the rows of all steps."""
        start = self.step * self.size
        return range(start + self.rank * self.size // self.world, start + (self.rank + 1) * self.size // self.world)


LoadJobs = Sequence[Callable[[], T]]


@dataclass
class Prefetcher(Generic[T, B]):
    """What a share's rows are is a function of the share, so that nothing depends on who made them and when.

    Threads suffice where the work is decoding or copying, which lets go of the interpreter's lock. Steps are made
    beforehand once a share follows upon the last of its kind; one that is asked for by the way changes nothing.
    """

    jobs: Callable[[BatchShard], LoadJobs[T]]  # one a row, or one for some of them
    joined: Callable[[Sequence[T]], B]  # what they made, as a batch
    workers: int  # threads; none, and rows are made when they are asked for
    steps: int = 2  # made beforehand
    coming: dict[BatchShard, Future[B]] = field(default_factory=dict)
    last: dict[BatchShard, int] = field(default_factory=dict)  # step of each kind of share

    @cached_property
    def pool(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(self.workers, "rows")

    @cached_property
    def desk(self) -> ThreadPoolExecutor:
        """Who puts rows together; it waits for the pool, so it must not be of it."""
        if not cuda_in_use():
            return ThreadPoolExecutor(1, "batches")
        # A thread begins on the first GPU, and would take memory there that belongs to another rank.
        here = torch.cuda.current_device()
        return ThreadPoolExecutor(1, "batches", initializer=torch.cuda.set_device, initargs=(here,))

    def take(self, share: BatchShard) -> B:
        if not self.workers:
            return self.joined([job() for job in self.jobs(share)])
        coming = self.coming.pop(share, None)
        rows = self._begun(share) if coming is None else []
        kind = replace(share, step=0)
        follows, self.last[kind] = self.last.get(kind) == share.step - 1, share.step
        soon = [replace(share, step=share.step + k) for k in range(1, self.steps + 1)] if follows else []
        for other in [other for other in self.coming if replace(other, step=0) == kind and other not in soon]:
            self.coming.pop(other).cancel()
        for next_one in soon:
            if next_one not in self.coming:
                self.coming[next_one] = self.desk.submit(self._made, next_one)
        return self.joined([row.result() for row in rows]) if coming is None else coming.result()

    def _begun(self, share: BatchShard) -> list[Future[T]]:
        return [self.pool.submit(job) for job in self.jobs(share)]

    def _made(self, share: BatchShard) -> B:
        return pin_batch(self.joined([row.result() for row in self._begun(share)]))


def cuda_in_use() -> bool:
    """Whether a GPU computes; where there is one that does not, nothing is prepared for it."""
    return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]


def whole_batch_prefetcher(made: Callable[[BatchShard], B], steps: int = 2) -> Prefetcher[B, B]:
    """Return a Prefetcher whose job makes a whole batch."""
    return Prefetcher(lambda share: [lambda: made(share)], lambda batches: batches[0], 1, steps)


def pin_batch(batch: B) -> B:
    """Return the batch with its CPU tensors in pinned memory if a GPU is in use."""
    if not cuda_in_use():
        return batch
    held: Any = batch
    found = {f.name: getattr(held, f.name) for f in fields(held)}
    moved = {
        name: x.pin_memory()
        for name, x in found.items()
        if isinstance(x, Tensor) and x.device.type == "cpu" and x.nbytes <= MOST
    }
    return replace(held, **moved)  # type: ignore[no-any-return]
