"""Read and write named tensors in safetensors files: written one at a time, read by rows from any number of shards."""

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

from ..core.checkpoint_files import FileChecksum
from ..core.errors import CheckpointError, DamagedCheckpointError

DTYPE_CODES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


@dataclass(frozen=True)
class TensorHeader:
    """Dtype and shape of a tensor in the header of a file."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        return self.dtype.itemsize * torch.Size(self.shape).numel()


class SafetensorsWriter:
    """Writes one file and computes its checksum. Add the tensors in the order of the header."""

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
        # From the tensor's memory, because numpy has no bf16.
        raw = (ctypes.c_char * (host.numel() * host.itemsize)).from_address(host.data_ptr()) if host.numel() else b""
        self._write(memoryview(raw))

    def _write(self, data: Any) -> None:
        self.file.write(data)
        self.crc = zlib.crc32(data, self.crc)
        self.bytes += len(data)

    def checksum(self) -> FileChecksum:
        return FileChecksum(bytes=self.bytes, crc=self.crc)


@contextmanager
def open_writer(path: Path, entries: Mapping[str, TensorHeader]) -> Iterator[SafetensorsWriter]:
    """Open a file for writing that is synced to disk when the block ends."""
    with path.open("wb") as file:
        yield SafetensorsWriter(file, entries)
        file.flush()
        os.fsync(file.fileno())


class TensorSource(Protocol):
    """A source of named tensors."""

    shapes: dict[str, tuple[int, ...]]

    def read(self, name: str, start: int, count: int) -> Tensor:
        """Return `count` rows of a tensor from `start` on; all of a scalar."""


class ShardedTensorReader:
    """Reads tensors whose shards, along dimension 0, are in several files in order."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self.files = [_open(path) for path in paths]
        self.shards: dict[str, list[tuple[Any, int]]] = {}  # by name: files, and how many rows each has
        self.shapes: dict[str, tuple[int, ...]] = {}
        for file in self.files:
            for name in file.keys():  # noqa: SIM118  # no dictionary
                shape = tuple(file.get_slice(name).get_shape())
                rows = self.shapes.get(name, (0,))[0] + (shape[0] if shape else 0)
                self.shapes[name] = (rows, *shape[1:]) if shape else ()
                self.shards.setdefault(name, []).append((file, shape[0] if shape else 1))

    def read(self, name: str, start: int, count: int) -> Tensor:
        if not self.shapes[name]:
            return self.shards[name][0][0].get_tensor(name)  # type: ignore[no-any-return]
        parts: list[Tensor] = []
        for file, rows in self.shards[name]:
            first, last = max(start, 0), min(start + count, rows)
            if first < last:
                parts.append(file.get_slice(name)[first:last])
            start -= rows
        return torch.cat(parts)


class InMemoryTensors:
    """Tensors held in memory."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self.tensors = tensors
        self.shapes = {name: tuple(x.shape) for name, x in tensors.items()}

    def read(self, name: str, start: int, count: int) -> Tensor:
        x = self.tensors[name]
        return x[start : start + count] if x.ndim else x


def load_pickled(path: Path) -> InMemoryTensors:
    """Load a state_dict saved by torch.save; a pickle with anything but tensors is refused without running it."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about pickle protocols
            tensors = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"{path} was not loaded, because it contains more than plain tensors and could run code; save its "
            "state_dict as .safetensors on a machine where you trust the file [TM292]"
        ) from error
    except (OSError, RuntimeError, EOFError, ValueError) as error:
        raise CheckpointError(
            f"{path} is not a file of torch.save, or it is damaged ({error}); give another file [TM293]"
        ) from error
    if not isinstance(tensors, dict) or not all(isinstance(x, Tensor) for x in tensors.values()):
        raise CheckpointError(
            f"{path} is not a flat dictionary of tensors; save only the state_dict of the network [TM294]"
        )
    return InMemoryTensors(tensors)


def _open(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except (OSError, SafetensorError) as error:
        raise DamagedCheckpointError(
            f"{path} is not a readable safetensors file ({error}), so it is damaged or incomplete [TM295]"
        ) from error
