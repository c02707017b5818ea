"""The index of runs: which directories are runs, their state and progress. Works on runs of any age and machine.

A summary is read from a few places of each file, so its cost does not depend on the length of a run, and it is read
again only if a file has changed.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any, Literal, TypeVar

from starlette.exceptions import HTTPException

from ..training.run_status import STATUS_FILE, RunStatus, read_status
from .metric_history import METRICS_FILE, MetricHistory, is_number, parse_row
from .sample_files import GRID_NAME, SampleFolder

C = TypeVar("C")
RunState = Literal["running", "finished", "stopped", "failed", "stale"]
MAX_DEPTH = 5  # of directories below the root
MAX_DIRECTORIES = 20_000  # looked at in one scan
SCAN_SECONDS = 2.0  # between scans for new directories
HEARTBEAT_SECONDS, SLOW_STEPS = 120.0, 5  # a run without a lock counts as running if its metrics are not older
MAX_HISTORIES, MAX_FOLDERS = 16, 32  # runs whose curves and samples are kept in memory
SPARKLINE_POINTS = 40
WHOLE_FILE_BYTES = 64 * 1024  # a file up to this size is read completely
TAIL_BYTES = 256 * 1024  # where the newest warning is looked for
ROW_BYTES = 4 * 1024  # read at each point of a sparkline
SPARKLINE_METRICS = ("reward/mean", "accuracy", "validation/accuracy", "psnr", "loss", "loss/policy")
RUN_FILES = (METRICS_FILE, "config.yaml", STATUS_FILE)
SKIPPED_FOLDERS = {"checkpoints", "samples", "eval", "evaluations", "__pycache__"}


@dataclass(frozen=True)
class NewestSample:
    """The newest grid of samples of a run."""

    step: int
    version: int  # changes with the file


@dataclass(frozen=True)
class RunSummary:
    """What the list shows of a run."""

    id: str  # path below the root, with slashes
    directory: Path
    state: RunState
    reason: str = ""  # why it failed or stopped
    step: int = 0
    steps: int = 0  # in all; 0 if unknown
    changed: float = 0.0  # when it last wrote something, in seconds since 1970
    metric: str = ""  # of the sparkline
    sparkline: tuple[tuple[int, float], ...] = ()
    warning: str = ""  # the newest one of the guard
    warning_step: int = 0
    sample: NewestSample | None = None
    num_grids: int = 0
    kind: str = ""  # objective, or what is trained
    step_seconds: float = 0.0  # of the newest step; 0 if unknown

    @property
    def name(self) -> str:
        return self.id

    @property
    def progress(self) -> float:
        return min(1.0, self.step / self.steps) if self.steps else 0.0


class RunIndex:
    """All runs below a directory. Methods may be called from any thread."""

    def __init__(self, runs: Path) -> None:
        directory = Path(os.path.abspath(runs))
        self.is_single = is_run(directory)
        self.root = directory.parent.resolve() if self.is_single else directory.resolve()
        self._only = directory.name if self.is_single else ""
        self._directories: dict[str, Path] = {}
        self._scanned = 0.0
        self._cache: dict[str, tuple[object, RunSummary]] = {}
        self._histories: OrderedDict[str, MetricHistory] = OrderedDict()
        self._folders: OrderedDict[str, SampleFolder] = OrderedDict()
        self._lock, self._reading = threading.RLock(), threading.Lock()

    def served_folders(self, data_folder: Path) -> tuple[Path, ...]:
        """Return the folders whose files may be served: all runs, or the one run beside the studio's own files."""
        return (self.root / self._only, data_folder) if self._only else (self.root,)

    def directories(self, *, fresh: bool = False) -> dict[str, Path]:
        """Return the directories of all runs by id. They are looked for again every two seconds."""
        with self._lock:
            if fresh or time.monotonic() - self._scanned > SCAN_SECONDS:
                found = [self.root / self._only] if self._only else find_runs(self.root)
                self._directories = {path.relative_to(self.root).as_posix(): path for path in found}
                self._cache = {id: entry for id, entry in self._cache.items() if id in self._directories}
                self._scanned = time.monotonic()
            return self._directories

    def summaries(self) -> list[RunSummary]:
        """Return the summaries of all runs, those that wrote last first."""
        with self._reading:  # a second request waits for the first, and then finds everything in the cache
            found = [self._summarize(id, directory) for id, directory in self.directories().items()]
        return sorted(found, key=lambda each: (each.state != "running", -each.changed, each.id))

    def find(self, id: str) -> RunSummary:
        """Return the summary of a run, or refuse the request."""
        return self._summarize(id, self._find_directory(id))

    def history(self, id: str) -> MetricHistory:
        """Return the curves of a run, up to date. Those of the runs looked at last stay in memory."""
        directory = self._find_directory(id)
        with self._lock:
            history = _touch(self._histories, id, MAX_HISTORIES) or MetricHistory(directory / METRICS_FILE)
            self._histories[id] = history
            history.update()
        return history

    def samples(self, id: str) -> SampleFolder:
        """Return the samples of a run, up to date."""
        directory = self._find_directory(id)
        with self._lock:
            folder = _touch(self._folders, id, MAX_FOLDERS) or SampleFolder(directory)
            self._folders[id] = folder
            folder.update()
        return folder

    def _find_directory(self, id: str) -> Path:
        """Return the directory of a run, or refuse the request. Only runs that a scan has found are served."""
        directory = self.directories().get(id) or self.directories(fresh=True).get(id)
        if directory is None:
            raise HTTPException(404, f"there is no run '{id:.200}' in this directory [TM1350]")
        return directory

    def _summarize(self, id: str, directory: Path) -> RunSummary:
        key = tuple(_stamp(directory / name) for name in (*RUN_FILES, "samples"))
        with self._lock:
            cached = self._cache.get(id)
        if cached is not None and cached[0] == key:
            summary = cached[1]
        else:
            summary = read_summary(id, directory)
            with self._lock:
                self._cache[id] = key, summary
        return replace_state(summary)


def _touch(cache: OrderedDict[str, C], id: str, limit: int) -> C | None:
    """Return an entry and make it the newest; the oldest entry is dropped if there are too many."""
    entry = cache.pop(id, None)
    while len(cache) >= limit:
        cache.popitem(last=False)
    return entry


def is_run(directory: Path) -> bool:
    """Whether a directory holds a run: metrics, or a configuration beside what a run writes."""
    if (directory / METRICS_FILE).is_file():
        return True
    others = (STATUS_FILE, "environment.json", "run.lock")
    return (directory / "config.yaml").is_file() and any((directory / name).exists() for name in others)


def find_runs(root: Path) -> Iterator[Path]:
    """Yield the directories of runs below a directory, in order of their names. Links are not followed."""
    pending, count = [(root, 0)], 0
    while pending and count < MAX_DIRECTORIES:
        folder, depth = pending.pop()
        count += 1
        try:
            with os.scandir(folder) as entries:
                children = [entry for entry in entries if entry.is_dir() and not entry.name.startswith(".")]
        except OSError:
            continue
        if depth and is_run(folder):
            yield folder
            children = [entry for entry in children if entry.name not in SKIPPED_FOLDERS]
        if depth < MAX_DEPTH:
            # A link would lead outside, list a run twice, or lead around in circles.
            inside = [Path(entry.path) for entry in children if not entry.is_symlink()]
            pending += [(path, depth + 1) for path in sorted(inside, reverse=True)]


def _stamp(path: Path) -> tuple[int, int] | None:
    try:
        info = path.stat()
    except OSError:
        return None
    return info.st_mtime_ns, info.st_size


# State


def replace_state(summary: RunSummary) -> RunSummary:
    """Return a summary with the state that the run has now: whether its process lives, and what it said last."""
    status, owner = read_status(summary.directory), find_owner(summary.directory)
    is_complete = bool(summary.steps) and summary.step >= summary.steps
    is_recent = time.time() - summary.changed < max(HEARTBEAT_SECONDS, SLOW_STEPS * summary.step_seconds)
    if owner is not None and owner.alive:
        return replace(summary, state="running")
    if status is not None and status.state != "running" and not _is_outdated(status, summary):
        return replace(summary, state=status.state, reason=status.reason if status.state != "finished" else "")
    if is_complete:
        return replace(summary, state="finished")
    if owner is not None:
        return replace(summary, state="stale", reason=f"{owner} ended without saying why; it was probably killed")
    if is_recent:
        return replace(summary, state="running")
    return replace(summary, state="stale", reason="it has not written anything for a while, and is not complete")


def _is_outdated(status: RunStatus, summary: RunSummary) -> bool:
    """Whether a run was continued after it said that it ended, by a version that does not write its status."""
    return summary.step > status.step and summary.step > 0 and status.state != "failed"


def find_owner(directory: Path) -> Any:
    """Return the owner of the run lock, if there is a lock file and this version has the lock."""
    if not (directory / "run.lock").exists() or not _has_run_lock():
        return None
    return importlib.import_module("tastemaker.training.run_lock").read_owner(directory)


def _has_run_lock() -> bool:
    return importlib.util.find_spec("tastemaker.training.run_lock") is not None


# Summaries


def read_summary(id: str, directory: Path) -> RunSummary:
    """Read what the list shows of a run, except its state."""
    summary = RunSummary(id, directory, "stale", changed=_newest_change(directory))
    steps, kind = read_plan(directory / "config.yaml")
    summary = replace(summary, steps=steps, kind=kind)
    with suppress(OSError), (directory / METRICS_FILE).open("rb") as file:
        summary = _read_metrics(summary, file)
    if not summary.steps and (status := read_status(directory)) is not None:
        summary = replace(summary, steps=status.steps)
    newest, count = find_newest_sample(directory / "samples", summary.step)
    return replace(summary, sample=newest, num_grids=count)


def _newest_change(directory: Path) -> float:
    stamps = [stamp for name in (METRICS_FILE, STATUS_FILE) if (stamp := _stamp(directory / name))]
    return max(stamps or [_stamp(directory / "config.yaml") or (0, 0)])[0] / 1e9


def _read_metrics(summary: RunSummary, file: IO[bytes]) -> RunSummary:
    size = os.fstat(file.fileno()).st_size
    file.seek(max(0, size - TAIL_BYTES))
    tail = file.read(TAIL_BYTES)
    tail = tail[: tail.rfind(b"\n") + 1]  # without a row that is still being written
    recent = _parse_rows(tail[-ROW_BYTES:]) or _parse_rows(tail)
    metric = next((name for name in SPARKLINE_METRICS if any(is_number(row.get(name)) for row in recent)), "")
    warning = _find_warning(tail)
    return replace(
        summary,
        step=recent[-1]["step"] if recent else 0,
        step_seconds=next((float(row["time/step"]) for row in recent if is_number(row.get("time/step"))), 0.0),
        metric=metric,
        sparkline=tuple(_sample_curve(file, size, tail, metric)) if metric else (),
        warning=str(warning["warning"]) if warning else "",
        warning_step=warning["step"] if warning else 0,
    )


def _parse_rows(text: bytes) -> list[dict[str, Any]]:
    return [row for line in text.splitlines() if (row := parse_row(line))]


def _find_warning(tail: bytes) -> dict[str, Any] | None:
    """Return the last row with a warning of the guard."""
    place = tail.rfind(b'"warning"')
    if place < 0:
        return None
    row = parse_row(tail[tail.rfind(b"\n", 0, place) + 1 : tail.find(b"\n", place)])
    return row if row is not None and isinstance(row.get("warning"), str) else None


def _sample_curve(file: IO[bytes], size: int, tail: bytes, metric: str) -> Iterator[tuple[int, float]]:
    """Yield points of a metric at about equal distances in the file, and the last one.

    Numbers are found by their names in the text, because parsing all values of a row takes ten times as long.
    """
    name = re.compile(rb'"%s": (-?\d[^,}\s]*)' % re.escape(metric.encode()))
    step = re.compile(rb'"step": (\d{1,12})')
    if size <= WHOLE_FILE_BYTES:
        lines = [line for line in tail.splitlines() if name.search(line)]
        groups = [[line] for line in lines[:: max(1, len(lines) // (2 * SPARKLINE_POINTS))]]
    else:
        groups = [_read_lines(file, k * (size - ROW_BYTES) // SPARKLINE_POINTS) for k in range(SPARKLINE_POINTS)]
    for lines in [*groups, tail[-2 * ROW_BYTES :].splitlines()[::-1]]:
        # Rows of the guard stand between those of steps.
        found = ((step.search(line), name.search(line)) for line in lines)
        if (pair := next((pair for pair in found if pair[0] and pair[1]), None)) and pair[0] and pair[1]:
            with suppress(ValueError):
                yield int(pair[0][1]), float(pair[1][1])


def _read_lines(file: IO[bytes], offset: int) -> list[bytes]:
    """Return the complete lines after an offset."""
    file.seek(offset)
    return file.read(ROW_BYTES).split(b"\n")[1 if offset else 0 : -1]


def read_plan(path: Path) -> tuple[int, str]:
    """Return the number of steps and the type of the objective in a config.yaml, without parsing all of it."""
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            text = file.read(WHOLE_FILE_BYTES)
    except OSError:
        return 0, ""
    steps = re.search(r"^steps:\s*(\d{1,12})\s*(?:#.*)?$", text, re.MULTILINE)
    section = re.search(r"^objective:\s*(?:\n\s+|\{\s*)type:\s*([\w.:-]{1,80})", text, re.MULTILINE)
    kind = next(
        (name for name in ("autoencoder", "judge", "preference") if re.search(rf"^{name}:", text, re.MULTILINE)), ""
    )
    return int(steps[1]) if steps else 0, section[1] if section else kind


def find_newest_sample(folder: Path, last_step: int) -> tuple[NewestSample | None, int]:
    """Return the newest grid of samples and the number of grids, from the names of the files."""
    try:
        with os.scandir(folder) as entries:
            names = [entry.name for entry in entries]
    except OSError:
        return None, 0
    found = [int(match[1]) for name in names if (match := GRID_NAME.fullmatch(name))]
    # Samples of later steps are left over from an earlier run in the same directory.
    steps = [step for step in found if step <= last_step] or found
    if not steps:
        return None, 0
    stamp = _stamp(folder / f"step-{max(steps):06d}.json")
    return NewestSample(max(steps), stamp[0] // 1_000_000 if stamp else 0), len(steps)
