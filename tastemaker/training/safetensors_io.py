"""Named tensors in the safetensors format: written one at a time, read by rows from any number of files."""

from __future__ import annotations

import ctypes
import json
import os
import pickle  # for the name of its error only
import warnings
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ..core.errors import CheckpointError as CheckpointError

DTYPE_CODES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


class DamagedCheckpointError(CheckpointError):
    """A checkpoint that was whole once; an older one may still be."""


@dataclass(frozen=True)
class TensorHeader:
    """What a file's header says of a tensor before its values are known."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        return self.dtype.itemsize * torch.Size(self.shape).numel()


@dataclass(frozen=True)
class FileChecksum:
    """Size and CRC of a file, to detect truncation and damage."""

    bytes: int
    crc: int


class SafetensorsWriter:
    """One file, sealed as it is written; the tensors come in the order of the header."""

    def __init__(self, file: BinaryIO, entries: Mapping[str, TensorHeader]) -> None:
        self.file, self.bytes, self.crc = file, 0, 0
        header, end = {}, 0
        for name, entry in entries.items():
            span = [end, end + entry.bytes]
            header[name] = {"dtype": DTYPE_CODES[entry.dtype], "shape": list(entry.shape), "data_offsets": span}
            end = span[1]
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        self._write(len(text).to_bytes(8, "little") + text)

    def add(self, tensor: Tensor) -> None:
        host = tensor.detach().cpu().contiguous()
        # Straight from the tensor's memory: numpy knows no bf16.
        raw = (ctypes.c_char * (host.numel() * host.itemsize)).from_address(host.data_ptr()) if host.numel() else b""
        self._write(memoryview(raw))

    def _write(self, data: Any) -> None:
        self.file.write(data)
        self.crc = zlib.crc32(data, self.crc)
        self.bytes += len(data)

    def seal(self) -> FileChecksum:
        return FileChecksum(self.bytes, self.crc)


@contextmanager
def open_writer(path: Path, entries: Mapping[str, TensorHeader]) -> Iterator[SafetensorsWriter]:
    """A file that is on the disk, not only on its way there, when the block ends."""
    with path.open("wb") as file:
        yield SafetensorsWriter(file, entries)
        file.flush()
        os.fsync(file.fileno())


def compute_checksum(path: Path) -> FileChecksum:
    """Return the size and CRC of a file."""
    crc, count = 0, 0
    with path.open("rb") as file:
        while block := file.read(1 << 22):
            crc, count = zlib.crc32(block, crc), count + len(block)
    return FileChecksum(count, crc)


class TensorSource(Protocol):
    """Named tensors to read from."""

    shapes: dict[str, tuple[int, ...]]

    def read(self, name: str, start: int, count: int) -> Tensor:
        """Rows of a tensor, or all of one without dimensions."""


class ShardedTensorReader:
    """Named tensors that lie in pieces, cut along dimension 0 in the order of the files."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self.files = [_open(path) for path in paths]
        self.pieces: dict[str, list[tuple[Any, int]]] = {}  # by name: file and rows
        self.shapes: dict[str, tuple[int, ...]] = {}
        for file in self.files:
            for name in file.keys():  # noqa: SIM118  # no dictionary
                shape = tuple(file.get_slice(name).get_shape())
                rows = self.shapes.get(name, (0,))[0] + (shape[0] if shape else 0)
                self.shapes[name] = (rows, *shape[1:]) if shape else ()
                self.pieces.setdefault(name, []).append((file, shape[0] if shape else 1))

    def read(self, name: str, start: int, count: int) -> Tensor:
        if not self.shapes[name]:
            return self.pieces[name][0][0].get_tensor(name)  # type: ignore[no-any-return]
        found: list[Tensor] = []
        for file, rows in self.pieces[name]:
            first, last = max(start, 0), min(start + count, rows)
            if first < last:
                found.append(file.get_slice(name)[first:last])
            start -= rows
        return torch.cat(found)


class InMemoryTensors:
    """Tensors held in memory."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self.tensors = tensors
        self.shapes = {name: tuple(x.shape) for name, x in tensors.items()}

    def read(self, name: str, start: int, count: int) -> Tensor:
        x = self.tensors[name]
        return x[start : start + count] if x.ndim else x


def load_pickled(path: Path) -> InMemoryTensors:
    """A dictionary of tensors saved by torch.save; a pickle with anything else in it is refused unread."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about pickle protocols: what matters is refused below
            found = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"{path} holds more than plain tensors, and reading it could run its code, so it was not loaded; "
            "save its state_dict as .safetensors where you trust it"
        ) from error
    except (OSError, RuntimeError, EOFError, ValueError) as error:
        raise CheckpointError(f"{path} is not a file of torch.save, or damaged ({error})") from error
    if not isinstance(found, dict) or not all(isinstance(x, Tensor) for x in found.values()):
        raise CheckpointError(f"{path} holds no flat dictionary of tensors; save the network's state_dict by itself")
    return InMemoryTensors(found)


def _open(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except (OSError, SafetensorError) as error:
        raise DamagedCheckpointError(f"{path} is not a readable safetensors file ({error})") from error
