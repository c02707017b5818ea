"""Read NumPy's .npy and .npz files without pickle, and without allocating more than the files hold."""

from __future__ import annotations

import math
import struct
import tokenize
import zipfile
import zlib
from collections.abc import Collection
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .errors import ConfigError

MAX_SMALL_BYTES = 1_000_000_000  # of arrays that may be compressed at any rate
MAX_RATIO = 100  # of larger arrays to their file: images and features do not compress so well
# What NumPy and zipfile raise for damaged files.
READING_ERRORS: tuple[type[Exception], ...] = (
    OSError,
    EOFError,
    ValueError,
    TypeError,
    KeyError,
    AttributeError,
    ArithmeticError,
    RuntimeError,
)
READING_ERRORS += (NotImplementedError, MemoryError, SyntaxError, struct.error, tokenize.TokenError)
READING_ERRORS += (zipfile.BadZipFile, zlib.error)


def read_array(path: Path) -> NDArray[Any]:
    """The array of an .npy file."""
    try:
        # Mapped first: a header that promises more than the file holds is refused before anything is allocated.
        return np.array(np.load(path, mmap_mode="r", allow_pickle=False))
    except READING_ERRORS as error:
        raise ConfigError(f"{path} cannot be read as an array ({error!s:.200}); write it again [TM1168]") from error


def read_arrays(path: Path, names: Collection[str] | None = None) -> dict[str, NDArray[Any]]:
    """The arrays of an .npz file by name: all, or those of the names given that it has."""
    try:
        with zipfile.ZipFile(path) as archive:
            entries = [entry for entry in archive.infolist() if _is_wanted(entry, names)]
            total, size = sum(entry.file_size for entry in entries), path.stat().st_size
            if total > max(MAX_SMALL_BYTES, MAX_RATIO * size):
                raise ValueError(f"{size} bytes would expand to {total} [TM1174]")
            return {entry.filename.removesuffix(".npy"): _read_entry(archive, entry) for entry in entries}
    except READING_ERRORS as error:
        raise ConfigError(
            f"{path} cannot be read as arrays ({error!s:.200}); write the file again with numpy.savez [TM1169]"
        ) from error


def _is_wanted(entry: zipfile.ZipInfo, names: Collection[str] | None) -> bool:
    name, _, suffix = entry.filename.rpartition(".")
    return suffix == "npy" and (names is None or name in names)


def _read_entry(archive: zipfile.ZipFile, entry: zipfile.ZipInfo) -> NDArray[Any]:
    with archive.open(entry) as file:
        version = np.lib.format.read_magic(file)
        read_header = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, _, dtype = read_header(file)
    if dtype.hasobject or math.prod(shape) * dtype.itemsize > entry.file_size:
        raise ValueError(f"'{entry.filename:.60}' of shape {list(shape)} is not in the file [TM1175]")
    with archive.open(entry) as file:
        array: NDArray[Any] = np.lib.format.read_array(file, allow_pickle=False)
    return array
