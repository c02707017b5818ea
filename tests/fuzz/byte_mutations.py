"""Damage valid files: flipped bits, wrong lengths, missing and repeated parts, and values that parsers stumble over."""

from __future__ import annotations

import random
import struct
import zlib
from collections.abc import Callable

TOKENS = (
    *(b"\x00", b"\xff", b"\xff\xff\xff\xff", b"\x7f\xff\xff\xff", b"\x80\x00\x00\x00", b"\xed\xa0\x80", b"\n", b'"'),
    *(b"-1", b"0", b"1e999", b"NaN", b"null", b"[]", b"{}", b"true", b'"\\ud800"', b"9" * 400, b"18446744073709551616"),
    *(
        b"[" * 150,
        b'{"a":' * 150,
        b"- " * 150,
        b"&a [*a, *a]",
        b"!!python/object/apply:os.system [id]",
        b"0x" + b"f" * 400,
    ),
    *(
        b"../../etc/passwd",
        b"/dev/zero",
        b"2001-02-30",
        b"<<: {a: 1}",
        b"? [a]\n: b\n",
        b"%00",
        b"\xef\xbb\xbf",
        b"\r\n",
    ),
)


def mutate(data: bytes, rng: random.Random) -> bytes:
    """Change a file at one to three places."""
    for _ in range(rng.choice((1, 1, 2, 3))):
        data = _mutate_once(data, rng)
    return data


def _mutate_once(data: bytes, rng: random.Random) -> bytes:
    start = rng.randrange(len(data) + 1)
    end = min(len(data), start + rng.choice((1, 2, 4, 8, 32)))
    kind = rng.randrange(8)
    if kind == 0 and start < len(data):  # flip a bit
        return data[:start] + bytes([data[start] ^ 1 << rng.randrange(8)]) + data[start + 1 :]
    if kind == 1:  # cut off, as a kill does
        return data[:start]
    if kind == 2:  # lose a part
        return data[:start] + data[end:]
    if kind == 3:  # repeat a part
        return data[:end] + data[start:end] * rng.choice((1, 7, 63)) + data[end:]
    if kind == 4:  # insert
        return data[:start] + rng.choice(TOKENS) + data[start:]
    if kind == 5:  # overwrite
        token = rng.choice(TOKENS)
        return data[:start] + token + data[start + len(token) :]
    if kind == 6:  # write a number as headers have them
        number = rng.choice((0, 1, 2**15, 2**31 - 1, 2**32 - 1, 2**40, 2**63, 2**64 - 1))
        form = rng.choice(("<I", ">I", "<Q", ">H", "B"))
        number &= (1 << 8 * struct.calcsize(form)) - 1
        return data[:start] + struct.pack(form, number) + data[start + struct.calcsize(form) :]
    return data[:start] + rng.randbytes(end - start) + data[end:]


def repair_png(data: bytes) -> bytes:
    """Compute the checksums of PNG chunks again, so that decoders look at their content."""
    parts, position = [data[:8]], 8
    while position + 12 <= len(data):
        length = struct.unpack_from(">I", data, position)[0]
        body = data[position + 4 : position + 8 + length]
        parts.append(data[position : position + 4] + body + struct.pack(">I", zlib.crc32(body)))
        position += 12 + length
    return b"".join(parts)


def repair_tar(data: bytes) -> bytes:
    """Compute the checksums of all blocks that look like tar headers again."""
    blocks = [data[i : i + 512] for i in range(0, len(data), 512)]
    for number, block in enumerate(blocks):
        if block[257:262] == b"ustar" and len(block) == 512:
            total = sum(block[:148]) + 8 * 32 + sum(block[156:])
            blocks[number] = block[:148] + b"%06o\0 " % total + block[156:]
    return b"".join(blocks)


def repair_nothing(data: bytes) -> bytes:
    return data


Repair = Callable[[bytes], bytes]
