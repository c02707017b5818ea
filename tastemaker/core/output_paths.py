"""Output files: checks of their paths before a command loads anything, and atomic writes."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from uuid import uuid4

from .registry import ConfigError
from .safe_files import check_text

MAX_NAME_BYTES = 200  # file systems allow 255
_umask_lock = threading.Lock()
SOURCE_FILE = "source.png"  # the source image of a prompt, beside its samples in an evaluation


def check_output_directory(path: Path, option: str = "--out") -> Path:
    """Return the path if it is a directory that can be written to, or if it can be created."""
    check_name_lengths(path, option)
    nearest = next(place for place in (path, *path.parents, Path()) if os.path.lexists(place))
    if not nearest.is_dir():
        raise ConfigError(
            f"{option}: expected a directory to write to, but {nearest} is a file; choose another {option} [TM089]"
        )
    if not os.access(nearest, os.W_OK | os.X_OK):
        raise ConfigError(
            f"{option}: the directory {nearest} is not writable; choose another directory, or change its "
            "permissions [TM090]"
        )
    return path


def check_name_lengths(path: Path, option: str = "--out") -> None:
    """Refuse names that file systems refuse, before anything is computed; ours need room for a temporary suffix."""
    check_text(str(path), option)
    longest = max(path.parts, key=lambda part: len(part.encode()), default="")
    if len(longest.encode()) > MAX_NAME_BYTES:
        raise ConfigError(
            f"{option}: the name '{longest:.40}...' has {len(longest.encode())} bytes; choose a name of at most "
            f"{MAX_NAME_BYTES} [TM1164]"
        )


def check_output_file(path: Path, option: str = "--out") -> Path:
    """Return the path if it is a file that can be written, or if it can be created."""
    check_name_lengths(path, option)
    if path.is_dir():
        raise ConfigError(f"{option}: expected a file to write to, but {path} is a directory; add a file name [TM091]")
    check_output_directory(path.parent, option)
    return path


@contextmanager
def replace_file(path: Path) -> Iterator[Path]:
    """A temporary path whose file replaces `path` at the end of the block: readers see all of it or nothing.

    The temporary name is random, because processes on several machines may have the same process id.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{uuid4().hex}")
    try:
        yield partial
        apply_umask(partial)
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


@contextmanager
def replace_directory(path: Path) -> Iterator[Path]:
    """A new temporary directory that becomes `path`, which must not exist, at the end of the block."""
    partial = path.with_name(f".{path.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    yield partial
    apply_umask(partial)
    os.replace(partial, path)


def apply_umask(path: Path) -> None:
    """Give a file, or all files in a directory, the permissions that new files have: safetensors writes 0600."""
    umask = read_umask()
    for file in path.rglob("*") if path.is_dir() else [path]:
        if file.is_file() and not file.is_symlink():
            file.chmod(0o666 & ~umask)


def read_umask() -> int:
    """The umask of the process; on Linux without a change of it, which files of other threads would notice."""
    try:
        status = Path("/proc/self/status").read_text(encoding="utf-8")
        return int(next(line for line in status.splitlines() if line.startswith("Umask:")).split()[1], 8)
    except (OSError, StopIteration):
        with _umask_lock:
            umask = os.umask(0)
            os.umask(umask)
        return umask


def user_cache_directory() -> Path:
    """Where the package keeps what it measured on this machine. Raises RuntimeError if there is no home directory."""
    home = os.environ.get("XDG_CACHE_HOME")
    return (Path(home) if home else Path.home() / ".cache") / "tastemaker"


def write_text_atomically(path: Path, text: str) -> None:
    with replace_file(path) as partial:
        partial.write_text(text, encoding="utf-8")
