"""Networks in ONNX files, read without a library: a list of operations, the tensors they use, and notes."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ...core.registry import ConfigError

Value = float | int | str | tuple[int, ...] | tuple[float, ...] | Tensor
KINDS = {1: torch.float32, 6: torch.int32, 7: torch.int64, 9: torch.bool, 10: torch.float16, 11: torch.float64}


@dataclass(frozen=True)
class Operation:
    kind: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    settings: dict[str, Value]


@dataclass(frozen=True)
class OnnxFile:
    operations: tuple[Operation, ...]
    tensors: dict[str, Tensor]
    inputs: tuple[str, ...]  # those that are no tensors of the file
    outputs: tuple[str, ...]
    notes: dict[str, str]


class ProtobufMessage:
    """One message in protobuf's wire format: its fields by number, each as often as it occurs."""

    def __init__(self, data: memoryview) -> None:
        self.fields: dict[int, list[int | memoryview]] = {}
        place = 0
        while place < len(data):
            key, place = varint(data, place)
            value: int | memoryview
            if key & 7 == 0:
                value, place = varint(data, place)
            else:
                size, place = varint(data, place) if key & 7 == 2 else ({1: 8, 5: 4}[key & 7], place)
                value, place = data[place : place + size], place + size
            self.fields.setdefault(key >> 3, []).append(value)

    def parts(self, number: int) -> Iterator[memoryview]:
        return (value for value in self.fields.get(number, ()) if isinstance(value, memoryview))

    def messages(self, number: int) -> Iterator[ProtobufMessage]:
        return (ProtobufMessage(part) for part in self.parts(number))

    def texts(self, number: int) -> tuple[str, ...]:
        return tuple(bytes(part).decode() for part in self.parts(number))

    def numbers(self, number: int) -> tuple[int, ...]:
        """Whole numbers, written one by one or all together."""
        found: list[int] = []
        for value in self.fields.get(number, ()):
            found += [signed(value)] if isinstance(value, int) else packed(value)
        return tuple(found)

    def floats(self, number: int) -> tuple[float, ...]:
        return tuple(x for part in self.parts(number) for (x,) in struct.iter_unpack("<f", part))


def varint(data: memoryview, place: int) -> tuple[int, int]:
    """A number of seven bits a byte, and where it ends."""
    value = shift = 0
    while True:
        byte = data[place]
        value |= (byte & 127) << shift
        place, shift = place + 1, shift + 7
        if byte < 128:
            return value, place


def packed(data: memoryview) -> list[int]:
    place, found = 0, []
    while place < len(data):
        value, place = varint(data, place)
        found.append(signed(value))
    return found


def signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value


def read_onnx(path: Path) -> OnnxFile:
    """The network in a file whose tensors are all inside it."""
    try:
        model = ProtobufMessage(memoryview(path.read_bytes()))
        (graph,) = model.messages(7)
        tensors = {message.texts(8)[0]: tensor(message) for message in graph.messages(5)}
        given = tuple(message.texts(1)[0] for message in graph.messages(11))
        return OnnxFile(
            tuple(operation(message) for message in graph.messages(1)),
            tensors,
            tuple(name for name in given if name not in tensors),
            tuple(message.texts(1)[0] for message in graph.messages(12)),
            {message.texts(1)[0]: message.texts(2)[0] for message in model.messages(14)},
        )
    except (OSError, ValueError, KeyError, IndexError, struct.error, RuntimeError) as error:
        raise ConfigError(f"{path} cannot be read as an ONNX file ({error}); install it again") from error


def tensor(message: ProtobufMessage) -> Tensor:
    (kind,) = message.numbers(2)
    shape, raw = message.numbers(1), b"".join(bytes(part) for part in message.parts(9))
    if raw:
        return torch.frombuffer(bytearray(raw), dtype=KINDS[kind]).view(shape)
    values = message.floats(4) or message.numbers(7) or message.numbers(5)
    return torch.tensor(values, dtype=KINDS[kind]).view(shape)


def operation(message: ProtobufMessage) -> Operation:
    settings = {attribute.texts(1)[0]: setting(attribute) for attribute in message.messages(5)}
    return Operation(message.texts(4)[0], message.texts(1), message.texts(2), settings)


def setting(message: ProtobufMessage) -> Value:
    (kind,) = message.numbers(20)
    if kind == 1:
        return message.floats(2)[0]
    if kind == 2:
        return message.numbers(3)[0]
    if kind == 3:
        return message.texts(4)[0]
    if kind == 4:
        return tensor(next(message.messages(5)))
    return message.floats(7) if kind == 6 else message.numbers(8)
