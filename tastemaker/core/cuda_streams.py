"""CUDA streams with which samples are scored while the next ones are sampled. Without CUDA they have no effect.

The sampler, the rewards and the copies of pixels to the host have a stream each. Kernels and their order are those of
serial scoring, so that scores are equal to the bit.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import torch
from torch import Tensor

# 0 is the lowest priority. The many short kernels of a sampler would otherwise wait for the long ones of a judge.
PRIORITIES = {"sampling": -1, "scoring": 0, "copying": -1}


@cache
def _cuda_stream(device: torch.device, purpose: Literal["sampling", "scoring", "copying"]) -> Any:
    """The stream of a device. One is shared by all its rewards, so that they may share networks and caches."""
    return torch.cuda.Stream(device, priority=PRIORITIES[purpose])  # type: ignore[no-untyped-call]


def _with_index(device: torch.device) -> torch.device:
    """The device with its number: 'cuda' means another one in each thread."""
    return torch.device("cuda", torch.cuda.current_device()) if device.index is None else device


@contextmanager
def sample_before_scoring(device: torch.device | None) -> Iterator[None]:
    """Give the work that is launched in the block priority over rewards that run on the same GPU."""
    if device is None or device.type != "cuda":
        yield
        return
    stream, caller = _cuda_stream(_with_index(device), "sampling"), torch.cuda.current_stream(device)
    stream.wait_stream(caller)  # also before memory that the caller's stream still reads is used again
    try:
        with torch.cuda.stream(stream):
            yield
    finally:
        caller.wait_stream(stream)


@dataclass(frozen=True)
class ScoringTurn:
    """What a thread needs to score a batch on a device: its stream, and the event after which it may begin."""

    stream: Any = None  # None: not on a GPU
    ready: Any = None

    @contextmanager
    def use(self) -> Iterator[None]:
        """Launch the block's work on the stream of rewards."""
        if self.stream is None:
            yield
            return
        with torch.cuda.stream(self.stream):  # which also selects the device, a new thread begins with the first one
            self.stream.wait_event(self.ready)
            yield


def scoring_turn(device: torch.device | None) -> ScoringTurn:
    """The turn of a batch whose reward runs on `device`: after all that the caller has launched there until now.

    The weights of the reward may be part of that. What the caller launches later does not delay the turn.
    """
    if device is None or device.type != "cuda":
        return ScoringTurn()
    device = _with_index(device)
    return ScoringTurn(_cuda_stream(device, "scoring"), torch.cuda.current_stream(device).record_event())


class HostCopy:
    """Tensors on the host, copied without making the caller or its CUDA stream wait."""

    def __init__(self, *tensors: Tensor) -> None:
        self._arrived: Any = None
        device = tensors[0].device
        if device.type != "cuda":
            self._copies = [x.detach().cpu() for x in tensors]
            return
        stream = _cuda_stream(_with_index(device), "copying")
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            self._copies = [_copy_to_pinned(x.detach()) for x in tensors]
            self._arrived = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            self._arrived.record(stream)
        for x in tensors:
            x.record_stream(stream)  # the caller may free them, but their memory is used again after the copy only

    def wait(self) -> list[Tensor]:
        """The copies. A thread that waits for them uses no core of the CPU."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._copies


def _copy_to_pinned(x: Tensor) -> Tensor:
    # With the same strides: kernels for other layouts, as of resizing, round differently.
    return torch.empty_like(x, device="cpu", pin_memory=True).copy_(x, non_blocking=True)


def copy_to_device(x: Tensor, device: torch.device) -> Tensor:
    """Move a tensor; from the host to a GPU without waiting for what that GPU is doing."""
    if device.type != "cuda" or x.device.type != "cpu":
        return x.to(device)
    return (x if x.is_pinned() else x.pin_memory()).to(device, non_blocking=True)
