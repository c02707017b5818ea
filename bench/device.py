"""The machine a bench runs on: its clock and its memory."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")


def settle() -> None:
    if CUDA:
        torch.cuda.synchronize()


def gib() -> float:
    return torch.cuda.max_memory_allocated() / 2**30 if CUDA else 0.0


def forget() -> None:
    if CUDA:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def seconds(work: Callable[[], Any], repeats: int = 3) -> float:
    """A call's, the median; the first is not counted."""
    found = []
    for number in range(repeats + 1):
        settle()
        began = time.perf_counter()
        work()
        settle()
        if number:
            found.append(time.perf_counter() - began)
    return sorted(found)[len(found) // 2]


def copied() -> float:
    """Bytes a second that a copy within the device reads and writes."""
    source = torch.randn(2**30 if CUDA else 2**20, device=DEVICE, dtype=torch.bfloat16)
    target = torch.empty_like(source)
    return 2 * source.numel() * source.element_size() / seconds(lambda: target.copy_(source), 5)
