"""Damaged files raise our own errors, in bounded time and memory, whatever reads them."""

from __future__ import annotations

import random
import resource
import shutil
import signal
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from byte_mutations import mutate
from reader_table import READERS, Reader, make_video

from tastemaker.core.errors import (
    CheckpointError,
    ConfigError,
    DownloadError,
    ImageError,
    RewardError,
    TrainingError,
)
from tastemaker.data.image_io import LIMIT_VARIABLE, read_image
from tastemaker.serving.protocol import ProtocolError

OWN_ERRORS = (ConfigError, ImageError, RewardError, TrainingError, CheckpointError, DownloadError, ProtocolError)
MAX_MEMORY = 96 * 2**10  # KB that all inputs of a reader together may add; the inputs have a few KB each
MAX_SECONDS = 60  # for one input; far above what the slowest takes on a slow machine
FAST_INPUTS = 130


class TookTooLong(BaseException):
    """Raised by the alarm, past all `except Exception`."""


@contextmanager
def alarm() -> Iterator[None]:
    def stop(*_: object) -> None:
        raise TookTooLong

    before = signal.signal(signal.SIGALRM, stop)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def peak_memory() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def reset_peak_memory() -> None:
    """Forget the peak of earlier tests, where the system allows it."""
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def try_input(reader: Reader, path: Path, data: bytes, allowed: tuple[type[Exception], ...] = OWN_ERRORS) -> str:
    """Read one input; returns what went wrong, if it is not an error that is allowed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    signal.setitimer(signal.ITIMER_REAL, MAX_SECONDS)
    try:
        reader.read(path)
    except allowed:
        return ""
    except TookTooLong:
        return f"more than {MAX_SECONDS} s"
    except BaseException as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        return f"{type(error).__name__}: {error!s:.120} ({Path(place.filename).name}:{place.lineno})"
    return ""


def fuzz(reader: Reader, folder: Path, inputs: int) -> list[str]:
    """Try the valid inputs and damaged ones; each failure is named by its number, from which it can be made again."""
    path, problems = folder / "input" / reader.file, []
    shutil.rmtree(folder / "input", ignore_errors=True)
    for data in reader.valid:
        problems += [f"valid input: {problem}" for problem in [try_input(reader, path, data, ())] if problem]
    reset_peak_memory()
    before = peak_memory()
    for number in range(inputs):
        rng = random.Random(f"{reader.name}/{number}")
        data = mutate(rng.choice(reader.valid), rng)
        data = reader.repair(data) if number % 2 else data
        problem = try_input(reader, path, data)
        if not problem and peak_memory() - before > MAX_MEMORY:
            problem, before = f"{(peak_memory() - before) // 1024} MB of memory", peak_memory()
        if problem:
            problems.append(f"{reader.name}, input {number}: {problem} of {data!r:.300}")
    return problems


def fuzz_all(folder: Path, monkeypatch: pytest.MonkeyPatch, *, slow: bool) -> None:
    monkeypatch.setenv(LIMIT_VARIABLE, "0.5")  # so that an image within the limit is small beside MAX_MEMORY
    problems = []
    with alarm():
        for reader in READERS:
            problems += fuzz(reader, folder, reader.slow_inputs if slow else FAST_INPUTS)[:5]
    assert not problems, "\n".join([f"{len(problems)} problems", *problems[:40]])


@pytest.mark.filterwarnings("ignore")  # of numpy and torch about old formats
def test_damaged_files_raise_errors_of_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fuzz_all(tmp_path, monkeypatch, slow=False)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_many_damaged_files_raise_errors_of_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert sum(reader.slow_inputs for reader in READERS) + VIDEO_INPUTS >= 100_000
    fuzz_all(tmp_path, monkeypatch, slow=True)


VIDEO_INPUTS = 400


@pytest.mark.slow
def test_damaged_videos_raise_errors_of_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("av")
    monkeypatch.setenv(LIMIT_VARIABLE, "0.5")
    reader = Reader("video", "a.mp4", read_image, [make_video(tmp_path)], VIDEO_INPUTS)
    with alarm():
        problems = fuzz(reader, tmp_path, reader.slow_inputs)
    assert not problems, "\n".join(problems[:20])
