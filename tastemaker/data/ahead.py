"""Rows made by threads, those of the next steps before they are asked for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class Share:
    """A rank's rows of a step."""

    step: int
    size: int
    rank: int
    world: int


Jobs = Sequence[Callable[[], T]]


@dataclass
class Ahead(Generic[T]):
    """What a share's rows are is a function of the share, so that nothing depends on who made them and when.

    Threads suffice where the work is decoding: Pillow and zlib let go of the interpreter's lock. Steps are made
    beforehand once a share follows upon the last of its kind; one that is asked for by the way changes nothing.
    """

    jobs: Callable[[Share], Jobs[T]]  # one a row
    workers: int  # threads; none, and rows are made when they are asked for
    steps: int = 2  # made beforehand
    coming: dict[Share, list[Future[T]]] = field(default_factory=dict)
    last: dict[Share, int] = field(default_factory=dict)  # step of each kind of share

    @cached_property
    def pool(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(self.workers, "pictures")

    def take(self, share: Share) -> list[T]:
        if not self.workers:
            return [job() for job in self.jobs(share)]
        rows = self.coming.pop(share, None) or self._begun(share)
        kind = replace(share, step=0)
        follows, self.last[kind] = self.last.get(kind) == share.step - 1, share.step
        soon = [replace(share, step=share.step + k) for k in range(1, self.steps + 1)] if follows else []
        for other in [other for other in self.coming if replace(other, step=0) == kind and other not in soon]:
            for row in self.coming.pop(other):
                row.cancel()
        for next_one in soon:
            if next_one not in self.coming:
                self.coming[next_one] = self._begun(next_one)
        return [row.result() for row in rows]

    def _begun(self, share: Share) -> list[Future[T]]:
        return [self.pool.submit(job) for job in self.jobs(share)]
