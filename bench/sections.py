"""Benchmark scripts in sections: each section is a process with a time limit, whose results count even if it fails.

Every result is printed and written to the output file at once, so that a script that is stopped early keeps them.
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

TINY_TIME_FACTOR = 10  # the time limits of --tiny are so much longer, because any machine may run it
START = float(os.environ.get("BENCH_START", time.monotonic()))  # of all sections, by time.monotonic()
SECTION_START = float(os.environ.get("SECTION_START", time.monotonic()))  # of this process, before its imports
Results = list[dict[str, Any]]
Record = Callable[[dict[str, Any]], None]


def log(section: str, text: str) -> None:
    print(f"[{section}] {time.monotonic() - START:.0f} s: {text}", flush=True)


def result_writer(out: str | Path) -> Record:
    """Return a function that appends a result and rewrites the output file."""
    results: Results = []

    def record(result: dict[str, Any]) -> None:
        results.append(result)
        write_results(out, results)

    return record


def write_results(out: str | Path, results: Results) -> None:
    """Replace the output file atomically, because the reader or the end of the process may come at any time."""
    if str(out) not in ("", "."):
        partial = Path(f"{out}.part")
        partial.write_text(json.dumps(results, indent=1), encoding="utf-8")
        partial.replace(out)


def read_results(path: Path) -> Results:
    results: Results = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else []
    return results


@contextmanager
def log_errors(section: str, what: str) -> Iterator[None]:
    """Log an error instead of raising it, so that the remaining measurements run."""
    try:
        yield
    except Exception as error:
        traceback.print_exc()
        log(section, f"{what} failed: {type(error).__name__}: {error!s:.300}")


def section_parser(sections: str, seconds: float) -> argparse.ArgumentParser:
    """Return a parser with the options that all scripts with sections share."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--tiny", action="store_true", help="small networks, on any machine")
    parser.add_argument("--out", default="", help="JSON file for the results")
    parser.add_argument("--sections", default=sections, help="sections to run, separated by commas")
    parser.add_argument("--seconds", type=float, default=seconds, help="time limit of all sections together")
    parser.add_argument("--slack", type=float, default=1.0, help="factor on the time limit of each section")
    parser.add_argument("--section", default="", help=argparse.SUPPRESS)
    return parser


def section_deadline(options: argparse.Namespace) -> float:
    """When the current section will be stopped, by time.monotonic()."""
    return SECTION_START + float(options.seconds) * (TINY_TIME_FACTOR if options.tiny else 1)


def run_sections(
    script: str,
    limits: Mapping[str, float],
    options: argparse.Namespace,
    arguments: Sequence[str] = (),
    **environment: str,
) -> Results:
    """Run the chosen sections as processes. A section is skipped if less than half of its time is left."""
    results, factor = Results(), TINY_TIME_FACTOR if options.tiny else 1
    for section in options.sections.split(","):
        limit, left = limits[section] * options.slack, options.seconds - (time.monotonic() - START) / factor
        if left < limit / 2:
            log(section, f"skipped: {left:.0f} s are left, but it takes {limit:.0f}")
            continue
        limit = min(limit, left)
        part = Path(tempfile.mkdtemp()) / "part.json"
        command = [sys.executable, script, "--section", section, "--out", str(part), "--seconds", f"{limit:.0f}"]
        command += [*(["--tiny"] if options.tiny else []), *arguments]
        times = {"BENCH_START": str(START), "SECTION_START": str(time.monotonic())}
        settings = os.environ | {"PYTHONUNBUFFERED": "1", **times, **environment}
        for _ in poll_process(command, settings, limit * factor, section):
            write_results(options.out, results + read_results(part))
        results += read_results(part)
    log("all", f"{time.monotonic() - START:.0f} s")
    return results


def poll_process(command: Sequence[str], settings: Mapping[str, str], limit: float, section: str) -> Iterator[None]:
    """Run a process, yielding every second until it has ended or its time is over, and once more at the end."""
    deadline = time.monotonic() + limit
    with kill_on_exit(subprocess.Popen(command, env=settings)) as process:
        while process.poll() is None and time.monotonic() < deadline:
            try:
                process.wait(min(1.0, max(0.01, deadline - time.monotonic())))
            except subprocess.TimeoutExpired:
                yield
        if process.poll() is None:
            log(section, f"stopped after {limit:.0f} s")
        elif process.returncode:
            log(section, f"failed with {process.returncode}")
    yield


@contextmanager
def kill_on_exit(process: subprocess.Popen[bytes]) -> Iterator[subprocess.Popen[bytes]]:
    """Kill a process at the end of the block, also on SIGTERM, because it would keep the device's memory."""
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        signal.signal(signal.SIGTERM, before)
