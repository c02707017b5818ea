"""Asynchronous metrics: report a step after the next one is launched, so that the GPU is never idle."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .events import StepCompleted

PendingMetrics = Callable[[], StepCompleted]
MAX_ASYNC_STEP_SECONDS = 1.0  # seconds: longer steps are told at once, for whoever watches should not wait for two


def is_due(done: int, every: int, steps: int) -> bool:
    """Return whether a periodic action is due: every `every` steps and after the last step."""
    return bool(every) and (done % every == 0 or done == steps)


def copy_to_host_async(values: Tensor) -> Callable[[], list[float]]:
    """Copy values [N] to the host without blocking. Call the returned function to wait for this copy alone."""
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
class AsyncMetrics:
    """Delay the metrics of at most one step, so that the host can launch the next one first."""

    leads: bool  # whether a device computes on while the host goes on
    waiting: PendingMetrics | None = None
    last: float = 0.0  # when something was told, by time.perf_counter()
    seconds: float = MAX_ASYNC_STEP_SECONDS  # what the last step took

    def told(self, begin: Callable[[], PendingMetrics], *, now: bool) -> Iterator[StepCompleted]:
        """Launch a step and yield the metrics of the previous one; also its own if `now`."""
        try:
            telling = begin()
        except Exception:
            yield from self.rest()  # what was done is not lost, and if it went wrong, that is why
            raise
        yield from self.rest()
        self.waiting = telling
        if now or not self.leads or self.seconds >= MAX_ASYNC_STEP_SECONDS:
            yield from self.rest()

    def rest(self) -> Iterator[StepCompleted]:
        telling, self.waiting = self.waiting, None
        if telling is None:
            return
        event, at = telling(), time.perf_counter()
        # The host may have begun it long before the device had time for it.
        self.seconds, self.last = min(event.seconds, at - self.last), at
        yield replace(event, seconds=self.seconds)
