"""Devices of this machine, found without torch: the studio does without it."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path


def list_devices() -> list[str]:
    """List the devices that a job can be given: cuda:0, cuda:1, ..., mps, cpu."""
    gpus = [f"cuda:{index}" for index in range(len(_visible_gpus()))]
    return [*gpus, *(["mps"] if sys.platform == "darwin" else []), "cpu"]


def choose_device(occupied: Sequence[str]) -> str:
    """Return the accelerator with the fewest jobs; the CPU if there is none."""
    accelerators = list_devices()[:-1]
    return min(accelerators, key=occupied.count) if accelerators else "cpu"


def visible_devices(device: str) -> str:
    """Value of CUDA_VISIBLE_DEVICES with which a process sees one device only: none for the CPU."""
    kind, _, index = device.partition(":")
    gpus = _visible_gpus()
    return gpus[int(index or 0)] if kind == "cuda" and int(index or 0) < len(gpus) else ""


def _visible_gpus() -> list[str]:
    """Numbers or ids of the GPUs that this process may use."""
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is not None:
        return [name.strip() for name in chosen.split(",") if name.strip() not in ("", "-1")]
    files = [path.name for path in Path("/dev").glob("nvidia[0-9]*")] if os.name == "posix" else []
    numbers = sorted(int(name.removeprefix("nvidia")) for name in files if re.fullmatch(r"nvidia\d+", name))
    return [str(index) for index in range(len(numbers))]
