"""Limits of a reward server, and the budget of memory that all of its requests share."""

from __future__ import annotations

import threading
from dataclasses import dataclass


@dataclass(frozen=True)
class ServiceLimits:
    """Bounds of what a server accepts at a time. Sizes are in bytes, timeouts in seconds."""

    max_requests: int = 64  # decoded, waiting or being scored
    max_bytes: int = 256 * 2**20  # of a request: of its body, and of its pixels as 32-bit floats
    max_total_bytes: int = 1024 * 2**20  # of all requests together: their bodies and what they decode to
    max_receiving: int = 256  # requests that have not arrived completely
    max_connections: int = 512
    header_timeout: float = 10.0  # from the connection, or the previous answer, to the end of the headers
    receive_timeout: float = 60.0  # for the whole body
    slow_seconds: float = 10.0  # of a body that may be slower than `min_rate`
    min_rate: float = 1024.0  # bytes per second of a body, on average
    answer_timeout: float = 600.0  # from the end of the body to the answer
    shutdown_timeout: float = 30.0  # for the requests in progress when the server is stopped


class BudgetExceededError(Exception):
    """More bytes than are left of a budget; `needed` is the sum that one request asked for."""

    def __init__(self, needed: int) -> None:
        super().__init__(needed)
        self.needed = needed


class MemoryBudget:
    """Counts the bytes of all requests together. Safe to use from several threads."""

    def __init__(self, total: int) -> None:
        self.total, self.used = total, 0
        self._lock = threading.Lock()

    def add(self, size: int) -> bool:
        """Count bytes that are about to be allocated, if they fit. A negative size returns them."""
        with self._lock:
            fits = size <= 0 or self.used + size <= self.total
            self.used += size if fits else 0
            return fits


class MemoryReservation:
    """The part of a budget that one request holds. It grows while the request arrives and is decoded."""

    def __init__(self, budget: MemoryBudget) -> None:
        self.budget, self.size = budget, 0

    def grow(self, size: int) -> None:
        """Reserve further bytes, or raise a `BudgetExceededError` and keep what is reserved."""
        if not self.budget.add(size):
            raise BudgetExceededError(self.size + size)
        self.size += size

    def shrink(self, size: int) -> None:
        """Return some of the bytes."""
        self.budget.add(-size)
        self.size -= size

    def release(self) -> None:
        """Return everything. A second call does nothing."""
        self.shrink(self.size)
