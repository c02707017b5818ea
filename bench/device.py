"""Timing and memory of the device that a benchmark script runs on."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")


def synchronize() -> None:
    if CUDA:
        torch.cuda.synchronize()


def allocated_gib() -> float:
    return torch.cuda.memory_allocated() / 2**30 if CUDA else 0.0


def peak_gib() -> float:
    return torch.cuda.max_memory_allocated() / 2**30 if CUDA else 0.0


def reset_memory() -> None:
    """Free cached memory and reset the peak."""
    if CUDA:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def median_seconds(work: Callable[[], Any], repeats: int = 3, warmup: int = 1) -> float:
    """Median time of a call, after warm-up calls."""
    times = []
    for _ in range(warmup):
        work()
    for _ in range(repeats):
        synchronize()
        start = time.perf_counter()
        work()
        synchronize()
        times.append(time.perf_counter() - start)
    return sorted(times)[len(times) // 2]


def seconds_in_graph(kernel: Callable[[], Any], repeats: int = 50) -> float:
    """Return the time of one call among many in a CUDA graph."""
    kernel()
    synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(repeats):
            kernel()
    return median_seconds(graph.replay, 5) / repeats


def copy_bandwidth() -> float:
    """Bytes per second that a copy within the device reads and writes."""
    source = torch.randn(2**30 if CUDA else 2**20, device=DEVICE, dtype=torch.bfloat16)
    target = torch.empty_like(source)
    return 2 * source.numel() * source.element_size() / median_seconds(lambda: target.copy_(source), 5)


class PhaseTimer:
    """Sums up the time spent in named phases."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        synchronize()
        start = time.perf_counter()
        yield
        synchronize()
        self.seconds[name] += time.perf_counter() - start


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Create parameters in a dtype, without a float32 copy first."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def device_name() -> str:
    return torch.cuda.get_device_name() if CUDA else "cpu"


def print_header() -> None:
    print(f"\n{device_name()}, PyTorch {torch.__version__}")
