"""Random numbers as a pure function of seed, step, row and purpose, whichever rank or device asks (Philox 4x32-10)."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from importlib.util import find_spec
from typing import Self

import torch
from torch import Tensor

WORD_MASK = 0xFFFFFFFF
Words = Callable[[Tensor, int, int, int, tuple[int, int]], Tensor]


def philox(counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[int, int]) -> tuple[Tensor, ...]:
    """Ten rounds of Philox (Salmon et al. 2011) on 32-bit words held in int64: [n] each."""
    a, b, c, d = counter
    low, high = key
    for _ in range(10):
        # The products need 64 unsigned bits: int64 wraps to the same bits, and masking after the shift drops the sign.
        first, second = a * 0xD2511F53, c * 0xCD9E8D57
        a, b, c, d = (
            (second >> 32 & WORD_MASK) ^ b ^ low,
            second & WORD_MASK,
            (first >> 32 & WORD_MASK) ^ d ^ high,
            first & WORD_MASK,
        )
        low, high = (low + 0x9E3779B9) & WORD_MASK, (high + 0xBB67AE85) & WORD_MASK
    return a, b, c, d


def philox_words_torch(rows: Tensor, count: int, purpose: int, draw: int, key: tuple[int, int]) -> Tensor:
    """`count` random 32-bit words for each of the rows [B], by operations that every device has: [B, count] int64."""
    blocks = torch.arange(math.ceil(count / 4), device=rows.device).repeat(len(rows), 1)
    row = rows[:, None].expand_as(blocks) & WORD_MASK
    counter = (blocks, torch.full_like(blocks, purpose), row, torch.full_like(blocks, draw))
    return torch.stack(philox(counter, key), 2).flatten(1)[:, :count]


@lru_cache(maxsize=1)
def select_philox_kernel() -> Words:
    """Select the Triton Philox kernel if it compiles here and agrees with the PyTorch version, else that version."""
    if find_spec("triton") is None:
        return philox_words_torch
    try:
        from .philox_triton import philox_words_triton

        rows = torch.tensor([0, 1, 2**31, WORD_MASK + 7], device="cuda")
        asked = (rows, 7, 0xA4093822, 3, (0x85A308D3, WORD_MASK))
        same = bool(philox_words_triton(*asked).equal(philox_words_torch(*asked)))
    except Exception:  # no compiler, no header files, another Triton: whatever it lacks, nobody should miss it
        return philox_words_torch
    return philox_words_triton if same else philox_words_torch


@dataclass(frozen=True)
class Randomness:
    """What row r draws for a purpose at a step is always the same, so resuming, sharding and pruning change nothing."""

    seed: int
    step: int
    rows: Tensor  # [B] int64 global row numbers; draws live on their device

    def __len__(self) -> int:
        return len(self.rows)

    def repeat(self, times: int) -> Self:
        """Rows of their own for `times` copies of each row, side by side."""
        copies = torch.arange(times, device=self.rows.device)
        return replace(self, rows=(self.rows[:, None] * times + copies).flatten())

    def shared(self) -> Self:
        """The same draws for every row of every rank."""
        return replace(self, rows=torch.zeros_like(self.rows))

    def words(self, purpose: str, count: int, draw: int = 0) -> Tensor:
        """`count` random 32-bit words a row: [B, count] int64."""
        key = ((self.seed ^ (self.seed >> 32)) & WORD_MASK, self.step & WORD_MASK)
        # A subclass stands in for a tensor where nothing is computed.
        if self.rows.is_cuda and type(self.rows) is Tensor and not torch.compiler.is_compiling():
            with torch.cuda.device(self.rows.device):
                return select_philox_kernel()(self.rows, count, zlib.crc32(purpose.encode()), draw & WORD_MASK, key)
        return philox_words_torch(self.rows, count, zlib.crc32(purpose.encode()), draw & WORD_MASK, key)

    def uniform(self, purpose: str, *shape: int, draw: int = 0) -> Tensor:
        """Uniform in [0, 1): [B, *shape] float32."""
        words = self.words(purpose, math.prod(shape), draw)
        return ((words >> 8).float() * 2.0**-24).view(len(self.rows), *shape)

    def normal(self, purpose: str, *shape: int, draw: int = 0) -> Tensor:
        """Standard normal, by Box and Muller: [B, *shape] float32."""
        count = math.prod(shape)
        pairs = math.ceil(count / 2)
        words = (self.words(purpose, 2 * pairs, draw) >> 8).float() * 2.0**-24
        radius = (-2 * torch.log(words[:, :pairs] + 2.0**-25)).sqrt()  # never log 0
        angle = words[:, pairs:] * (2 * math.pi)
        both = torch.cat([radius * torch.cos(angle), radius * torch.sin(angle)], 1)
        return both[:, :count].view(len(self.rows), *shape)

    def number(self, purpose: str, draw: int = 0) -> float:
        """One uniform number in [0, 1) that all rows and ranks share."""
        one = replace(self, rows=torch.zeros(1, dtype=torch.int64))
        return float(one.uniform(purpose, 1, draw=draw))
