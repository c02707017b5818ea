"""Metrics of training steps: averaged on the device, and reported without making the GPU wait for the host."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from ..core.objective import Comm
from ..core.reward import Rubric
from ..core.types import Loss
from .engine import LaunchedUpdate
from .events import StepCompleted

MAX_ASYNC_STEP_SECONDS = 1.0  # longer steps are reported at once: their user should not wait for the next one
STD_OF = {"reward/mean": "reward/std"}  # means whose standard deviation over samples is reported too


class AverageMeter:
    """Running means of metrics over samples, parts and micro-batches, reduced over ranks at the end."""

    def __init__(self) -> None:
        self.sums: dict[str, Tensor] = {}
        self.counts: dict[str, float] = {}

    def add(self, metrics: Mapping[str, Tensor], samples: int) -> None:
        """Add the means of metrics, scalars or [samples], each weighted by the number of samples."""
        squares = {std: metrics[mean].detach().float().square() for mean, std in STD_OF.items() if mean in metrics}
        metrics = {**metrics, **squares}
        means = [value.detach().float().mean() for value in metrics.values()]
        # One fused kernel for all metrics: launching one for each would take as long as a small network.
        for name, value in zip(metrics, torch._foreach_mul(means, samples) if means else (), strict=True):
            self.sums[name] = self.sums[name] + value if name in self.sums else value
            self.counts[name] = self.counts.get(name, 0.0) + samples

    def add_loss(self, loss: Loss, parts: int, name: str = "loss/policy") -> None:
        """Add the loss of one of `parts` parts, and its metrics. The losses of all parts add up to `name`."""
        samples = len(loss.rows)
        self.add(loss.metrics, samples * loss.steps)
        self.add({name: loss.rows * parts}, samples)

    def mean(self, comm: Comm) -> dict[str, Tensor]:
        """Return the means over all ranks: scalars on the device."""
        sums = list(self.sums.values())
        stacked = comm.mean(torch.stack(torch._foreach_div(sums, list(self.counts.values()))))
        means = dict(zip(self.sums, stacked.unbind(), strict=True))
        for mean, std in STD_OF.items():
            if std in means:  # the mean square so far: sums do not depend on how samples are split
                means[std] = (means[std] - means[mean].square()).clamp(min=0).sqrt()
        return means

    def compute(self, comm: Comm) -> dict[str, float]:
        """Return the means over all ranks as numbers, which waits for the GPU."""
        means = self.mean(comm)
        return dict(zip(means, torch.stack(list(means.values())).tolist(), strict=True))


def scoring_metrics(rubric: Rubric, device: torch.device) -> dict[str, Tensor]:
    """Return what rewards report beside their scores since the last call: scalars scoring/NAME/METRIC."""
    return {
        f"scoring/{name}/{metric}": torch.tensor(value, device=device)
        for name, weighted in rubric.rewards.items()
        for metric, value in weighted.reward.metrics().items()
    }


class StepTimer:
    """Seconds of the phases of a step; CUDA events measure them on a GPU without making the host wait."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._spans: list[tuple[str, Any, Any]] = []

    @contextmanager
    def measure(self, phase: str) -> Iterator[None]:
        """Add the time of the block to `phase`. Blocks of different phases may be nested."""
        start = self._mark()
        yield
        self._spans.append((phase, start, self._mark()))

    def _mark(self) -> Any:
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def seconds(self) -> dict[str, float]:
        """Return seconds by phase. On a GPU, call this after the metrics of the step have arrived on the host."""
        totals: dict[str, float] = {}
        for phase, start, end in self._spans:
            elapsed = start.elapsed_time(end) / 1000 if self._cuda else end - start
            totals[phase] = totals.get(phase, 0.0) + elapsed
        return totals


@dataclass(frozen=True)
class StepMetrics:
    """Metrics of a launched training step, on the device until they are copied to the host."""

    step: int  # steps completed with this one
    samples: int  # over all ranks
    means: Mapping[str, Tensor]  # scalars, averaged over all ranks
    updates: Sequence[tuple[str, LaunchedUpdate]]  # optimizer steps, each with the name of its gradient norm
    lr: float
    started: float  # time.perf_counter() at the start of the step
    timings: Callable[[], Mapping[str, float]] = field(default=dict)  # called once the step is done on the device

    def pack(self) -> Tensor:
        """Return all device values in one tensor [N + 2 * updates], so that one copy brings them to the host."""
        return torch.cat([torch.stack(list(self.means.values())), *(update.measured for _, update in self.updates)])

    def to_event(self, packed: Sequence[float] | None = None) -> StepCompleted:
        """Return the event of this step, from a host copy of `pack()` or by waiting for the GPU.

        Raises TrainingError if one of the updates was refused because its gradient was not finite.
        """
        values = self.pack().tolist() if packed is None else packed
        count = len(self.means)
        grad_norms = {
            name: update.read(values[count + 2 * i : count + 2 * i + 2]).grad_norm
            for i, (name, update) in enumerate(self.updates)
        }
        metrics = {**dict(zip(self.means, values[:count], strict=True)), **grad_norms, "lr": self.lr}
        return StepCompleted(self.step, metrics, time.perf_counter() - self.started, self.samples, self.timings())


class AsyncMetrics:
    """Turns the metrics of a step into its event after the next step is launched, so that the GPU is never idle."""

    def __init__(self, enabled: bool) -> None:
        self.enabled = enabled  # whether the device computes while the host continues
        self._pending: tuple[StepMetrics, Callable[[], list[float]]] | None = None
        self._reported = 0.0  # when the last step was reported, by time.perf_counter()
        self._seconds = MAX_ASYNC_STEP_SECONDS  # of the last step

    def push(self, metrics: StepMetrics, *, wait: bool = False) -> Iterator[StepCompleted]:
        """Yield the event of the previous step; also that of this step if `wait`, or if steps are long."""
        copy = copy_to_host_async(metrics.pack())
        yield from self.flush()
        self._pending = metrics, copy
        if wait or not self.enabled or self._seconds >= MAX_ASYNC_STEP_SECONDS:
            yield from self.flush()

    def flush(self) -> Iterator[StepCompleted]:
        """Yield the event of the step that has not been reported yet, if there is one."""
        if self._pending is None:
            return
        (metrics, copy), self._pending = self._pending, None
        event, now = metrics.to_event(copy()), time.perf_counter()
        # The host may have launched the step long before the device had time for it.
        self._seconds, self._reported = min(event.seconds, now - self._reported), now
        yield replace(event, seconds=self._seconds)


def copy_to_host_async(values: Tensor) -> Callable[[], list[float]]:
    """Copy values [N] to the host without blocking. Call the returned function to wait for this copy alone."""
    if not values.is_cuda:
        return values.tolist
    host = torch.empty_like(values, device="cpu", pin_memory=True).copy_(values, non_blocking=True)
    copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
    copied.record()

    def wait() -> list[float]:
        copied.synchronize()
        numbers: list[float] = host.tolist()
        return numbers

    return wait
