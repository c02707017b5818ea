"""Reads protobuf messages without their schema: fields by number. Enough for ONNX and sentencepiece files."""

from __future__ import annotations

from collections.abc import Iterator

Fields = dict[int, list[int | memoryview]]


def read_fields(data: memoryview) -> Fields:
    """The fields of one protobuf message by number, each as often as it occurs: integers, or bytes."""
    fields: Fields = {}
    position = 0
    while position < len(data):
        key, position = read_varint(data, position)
        number, wire_type = key >> 3, key & 7
        if wire_type == 0:
            value, position = read_varint(data, position)
            fields.setdefault(number, []).append(value)
        else:
            size, position = read_varint(data, position) if wire_type == 2 else ({1: 8, 5: 4}[wire_type], position)
            fields.setdefault(number, []).append(data[position : position + size])
            position += size
    return fields


def read_varint(data: memoryview, position: int) -> tuple[int, int]:
    """An integer of seven bits a byte, and the position after it."""
    value = shift = 0
    while True:
        byte = data[position]
        value |= (byte & 127) << shift
        position, shift = position + 1, shift + 7
        if byte < 128:
            return value, position
        if shift > 63:
            raise ValueError("an integer has more than 64 bits [TM1172]")


def chunks(fields: Fields, number: int) -> Iterator[memoryview]:
    return (value for value in fields.get(number, ()) if isinstance(value, memoryview))


def messages(fields: Fields, number: int) -> Iterator[Fields]:
    return (read_fields(value) for value in chunks(fields, number))


def text(fields: Fields, number: int) -> str:
    return str(next(chunks(fields, number)), "utf-8")
