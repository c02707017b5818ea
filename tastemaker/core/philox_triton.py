"""Philox as one Triton kernel, instead of a hundred tensor operations. Triton comes with PyTorch for GPUs."""
# mypy: ignore-errors
# Triton's language does not type-check: pointers are added to, and every number may be a tensor.

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 256
UNSPECIALIZED = ["purpose", "draw", "low", "high", "blocks", "count", "total"]  # one kernel for all values of these


@triton.jit(do_not_specialize=UNSPECIALIZED)
def _words(rows, out, purpose, draw, low, high, blocks, count, total, BLOCK: tl.constexpr):
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    valid = index < total
    row, block = index // blocks, index % blocks
    a = block & 0xFFFFFFFF
    b = a * 0 + (purpose.to(tl.int64) & 0xFFFFFFFF)
    c = tl.load(rows + row, valid, other=0).to(tl.int64) & 0xFFFFFFFF
    d = a * 0 + (draw.to(tl.int64) & 0xFFFFFFFF)
    low, high = low.to(tl.int64) & 0xFFFFFFFF, high.to(tl.int64) & 0xFFFFFFFF
    for _ in tl.static_range(10):
        first, second = a * 0xD2511F53, c * 0xCD9E8D57
        a, b = ((second >> 32) & 0xFFFFFFFF) ^ b ^ low, second & 0xFFFFFFFF
        c, d = ((first >> 32) & 0xFFFFFFFF) ^ d ^ high, first & 0xFFFFFFFF
        low, high = (low + 0x9E3779B9) & 0xFFFFFFFF, (high + 0xBB67AE85) & 0xFFFFFFFF
    start, word = row * count, 4 * block
    tl.store(out + start + word, a, valid & (word < count))
    tl.store(out + start + word + 1, b, valid & (word + 1 < count))
    tl.store(out + start + word + 2, c, valid & (word + 2 < count))
    tl.store(out + start + word + 3, d, valid & (word + 3 < count))


def philox_words_triton(rows: Tensor, count: int, purpose: int, draw: int, key: tuple[int, int]) -> Tensor:
    """`count` random 32-bit words for each of the rows [B]: [B, count] int64."""
    out = torch.empty(len(rows), count, dtype=torch.int64, device=rows.device)
    blocks = triton.cdiv(count, 4)
    total = len(rows) * blocks
    if total:
        numbers = [_signed(word) for word in (purpose, draw, *key)]
        _words[(triton.cdiv(total, BLOCK),)](rows.contiguous(), out, *numbers, blocks, count, total, BLOCK)
    return out


def _signed(word: int) -> int:
    """The 32 bits as a signed number. With one type for all words, the kernel is compiled once."""
    return (word & 0xFFFFFFFF) - ((word & 0x80000000) << 1)
