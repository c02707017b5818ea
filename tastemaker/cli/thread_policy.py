"""How OpenMP threads wait, decided before PyTorch is imported."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import MutableMapping
from pathlib import Path

# With one of these set, the user has decided.
SETTINGS = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME", "OMP_NUM_THREADS")
SAMPLES, PAUSE = 5, 0.004  # seconds between looks at the number of running threads


def choose_wait_policy(environment: MutableMapping[str, str] = os.environ, running: float | None = None) -> None:
    """Let waiting OpenMP threads sleep if other processes need the cores.

    By default they spin for a while, which is 15 % faster on an idle machine. On a busy one the spinning thread keeps
    the one it waits for off its core: a training step of the demo then took 35 s instead of 8 s. `running` is the
    number of threads of other processes that run now; it is measured if not given.
    """
    if sys.platform != "linux" or "torch" in sys.modules or any(name in environment for name in SETTINGS):
        return
    running = count_running_threads() if running is None else running
    free = (os.cpu_count() or 1) - running
    if free < len(os.sched_getaffinity(0)) - 0.5:
        environment["OMP_WAIT_POLICY"] = "passive"


def count_running_threads(source: Path = Path("/proc/loadavg")) -> float:
    """Threads of other processes that are running or ready to run, on average over some milliseconds; 0 if unknown."""
    counts = []
    for _ in range(SAMPLES):
        try:
            counts.append(int(source.read_text(encoding="ascii").split()[3].partition("/")[0]) - 1)
        except (OSError, ValueError, IndexError):
            return 0.0
        time.sleep(PAUSE)
    return sum(counts) / len(counts)
