"""Benches in sections: each is a process of its own with a time limit, whose results count even if it fails.

Whoever ends a bench early keeps what it found: each number is said and written down as soon as it is known.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

PATIENCE = 10  # times as long the same lines may take at small size, on whatever machine
BEGAN = float(os.environ.get("BENCH_BEGAN", time.monotonic()))  # likewise of time.monotonic(): of all sections
ENTERED = float(os.environ.get("SECTION_BEGAN", time.monotonic()))  # this process, before anything was imported
Found = list[dict[str, Any]]
Keep = Callable[[dict[str, Any]], None]


def say(section: str, text: str) -> None:
    print(f"[{section}] {time.monotonic() - BEGAN:.0f} s: {text}", flush=True)


def keeper(out: str | Path) -> Keep:
    """Who writes every line down at once."""
    found: Found = []

    def keep(line: dict[str, Any]) -> None:
        found.append(line)
        write(out, found)

    return keep


def write(out: str | Path, found: Found) -> None:
    """Never half of it, for whoever reads may come, and whoever writes may be ended, at any time."""
    if str(out) not in ("", "."):
        part = Path(f"{out}.part")
        part.write_text(json.dumps(found, indent=1), encoding="utf-8")
        part.replace(out)


@contextmanager
def spared(section: str, what: str) -> Iterator[None]:
    """Within the block whatever fails says so, and leaves others to be measured."""
    try:
        yield
    except Exception as error:
        traceback.print_exc()
        say(section, f"{what} failed: {type(error).__name__}: {error!s:.300}")


def deadline(chosen: argparse.Namespace) -> float:
    """Of time.monotonic(): when a section will be ended."""
    return ENTERED + float(chosen.seconds) * (PATIENCE if chosen.tiny else 1)


def carry_out(
    script: str, limits: Mapping[str, float], chosen: argparse.Namespace, more: Sequence[str] = (), **environment: str
) -> Found:
    """Those chosen, within the seconds there are for all; one that has not even half of its time is left out."""
    found, patience = Found(), PATIENCE if chosen.tiny else 1
    for section in chosen.sections.split(","):
        most, left = limits[section], chosen.seconds - (time.monotonic() - BEGAN) / patience
        if left < most / 2:
            say(section, f"left out: {left:.0f} s are left, and it takes {most:.0f}")
            continue
        limit = min(most, left)
        part = Path(tempfile.mkdtemp()) / "part.json"
        command = [sys.executable, script, "--section", section, "--out", str(part), "--seconds", f"{limit:.0f}"]
        command += [*(["--tiny"] if chosen.tiny else []), *more]
        began = {"BENCH_BEGAN": str(BEGAN), "SECTION_BEGAN": str(time.monotonic())}
        settings = os.environ | {"PYTHONUNBUFFERED": "1", **began, **environment}
        for _ in followed(command, settings, limit * patience, section):
            write(chosen.out, found + read(part))
        found += read(part)
    say("all", f"{time.monotonic() - BEGAN:.0f} s")
    return found


def read(part: Path) -> Found:
    found: Found = json.loads(part.read_text(encoding="utf-8")) if part.is_file() else []
    return found


def followed(command: Sequence[str], settings: Mapping[str, str], limit: float, section: str) -> Iterator[None]:
    """Comes back every second until a process has ended or its time is over, and once more."""
    end = time.monotonic() + limit
    with ending(subprocess.Popen(command, env=settings)) as process:
        while process.poll() is None and time.monotonic() < end:
            try:
                process.wait(min(1.0, max(0.01, end - time.monotonic())))
            except subprocess.TimeoutExpired:
                yield
        if process.poll() is None:
            say(section, f"ended after {limit:.0f} s")
        elif process.returncode:
            say(section, f"failed with {process.returncode}")
    yield


@contextmanager
def ending(process: subprocess.Popen[bytes]) -> Iterator[subprocess.Popen[bytes]]:
    """Within the block; afterwards it is ended, also when this process is told to, for it would keep the device."""
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        signal.signal(signal.SIGTERM, before)
