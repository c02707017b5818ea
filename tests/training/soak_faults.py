"""Faults within the processes of a soak; `tastemaker --import soak_faults` plants them.

A file in the folder SOAK_FAULTS makes the process that finds it fail once. With SOAK_SLOW_DISK, every write of a tensor
into a checkpoint takes longer, and one in 500 takes a second. Scores never depend on either.
"""

import errno
import faulthandler
import os
import random
import signal
import time
from pathlib import Path
from typing import Any

from tastemaker.training.safetensors_io import SafetensorsWriter

FOLDER, SLOW_DISK = Path(os.environ["SOAK_FAULTS"]), float(os.environ.get("SOAK_SLOW_DISK", "0"))
write = SafetensorsWriter._write
times = random.Random(os.getpid())  # other times in every process


def take(fault: str) -> bool:
    """Return whether a fault was ordered; the first process that asks gets it."""
    try:
        (FOLDER / fault).unlink()
    except FileNotFoundError:
        return False
    return True


def write_slowly(self: SafetensorsWriter, data: Any) -> None:
    if take("disk"):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    if SLOW_DISK:
        time.sleep(1.0 if times.random() < 1 / 500 else times.random() * SLOW_DISK)
    write(self, data)


def brightness(images: Any, prompts: list[str], **metadata: Any) -> Any:
    """A reward that fails when it is told to."""
    if take("reward"):
        raise ConnectionError("the scorer is gone")
    return images.mean((1, 2, 3))


SafetensorsWriter._write = write_slowly
faulthandler.register(signal.SIGUSR1)  # so that a rank that hangs can say where
