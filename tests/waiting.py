"""Waits for conditions instead of for times, which a slow machine exceeds."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from pathlib import Path


def wait_until(condition: Callable[[], object], seconds: float = 120.0, interval: float = 0.01) -> None:
    """Return as soon as a condition holds; fail if it does not within a time that is generous on any machine."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"what was awaited did not happen within {seconds:.0f} s"
        time.sleep(interval)


def handles_signal(pid: int, number: signal.Signals) -> bool:
    """Whether a process has a handler for a signal: installed by its program, and not yet reset by a delivery."""
    (mask,) = [line.split()[1] for line in read_status(pid) if line.startswith("SigCgt:")]
    return bool(int(mask, 16) >> (number - 1) & 1)


def is_frozen(pid: int) -> bool:
    """Whether SIGSTOP has stopped every thread of a process."""
    threads = [int(entry.name) for entry in Path(f"/proc/{pid}/task").iterdir()]
    return all("State:\tT (stopped)" in read_status(thread) for thread in threads)


def read_status(pid: int) -> list[str]:
    """Lines of the kernel's description of a process or thread."""
    return Path(f"/proc/{pid}/status").read_text().splitlines()
