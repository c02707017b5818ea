"""A step is told of when the next one was begun, so that a GPU has something to do while the host prepares it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .events import Updated

Telling = Callable[[], Updated]
SOON = 1.0  # seconds: longer steps are told at once, for whoever watches should not wait for two


def due(done: int, every: int, steps: int) -> bool:
    """Whether something that is done every so many steps, and after the last, is to be done now."""
    return bool(every) and (done % every == 0 or done == steps)


def fetched(values: Tensor) -> Callable[[], list[float]]:
    """Begin to bring numbers [N] to the host; they are waited for when asked, and nothing that was begun later is."""
    if not values.is_cuda:
        return values.tolist
    here = torch.empty_like(values, device="cpu", pin_memory=True).copy_(values, non_blocking=True)
    there = torch.cuda.Event()  # type: ignore[no-untyped-call]
    there.record()

    def numbers() -> list[float]:
        there.synchronize()
        found: list[float] = here.tolist()
        return found

    return numbers


@dataclass
class Lead:
    """Holds back what is to be told of one step at most."""

    leads: bool  # whether a device computes on while the host goes on
    waiting: Telling | None = None
    last: float = 0.0  # when something was told, by time.perf_counter()
    seconds: float = SOON  # what the last step took

    def told(self, begin: Callable[[], Telling], *, now: bool) -> Iterator[Updated]:
        """Begin a step, and tell what there is to tell: of the one before it, and of it if it is wanted now."""
        try:
            telling = begin()
        except Exception:
            yield from self.rest()  # what was done is not lost, and if it went wrong, that is why
            raise
        yield from self.rest()
        self.waiting = telling
        if now or not self.leads or self.seconds >= SOON:
            yield from self.rest()

    def rest(self) -> Iterator[Updated]:
        telling, self.waiting = self.waiting, None
        if telling is None:
            return
        event, at = telling(), time.perf_counter()
        # The host may have begun it long before the device had time for it.
        self.seconds, self.last = min(event.seconds, at - self.last), at
        yield replace(event, seconds=self.seconds)
