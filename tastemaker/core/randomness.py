"""Random numbers as a pure function of seed, step, row and purpose, on every rank and device (Philox 4x32-10)."""

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
    """`count` random 32-bit words for each of the rows [B], in PyTorch operations: [B, count] int64."""
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
        arguments = (rows, 7, 0xA4093822, 3, (0x85A308D3, WORD_MASK))
        same = bool(philox_words_triton(*arguments).equal(philox_words_torch(*arguments)))
    except Exception:  # no compiler, no headers, another Triton version
        return philox_words_torch
    return philox_words_triton if same else philox_words_torch


class Purpose:
    """Names of the random streams. A value is hashed into the counter, so that changing one changes all its numbers."""

    # Sampling
    INITIAL_NOISE = "start"  # of a diffusion sample
    SAMPLER_STEP = "step"  # noise of an SDE step
    SDE_WINDOW = "window"  # start of the SDE window
    TOKEN = "token"  # the token sampled at a position
    REVEAL = "reveal"  # which masked tokens are revealed at a step
    SCHEDULER = "scheduler"  # seeds of diffusers schedulers
    # Search
    RESAMPLING = "resampling"  # which particles continue
    NEIGHBOR = "neighbor"  # distance of an initial noise from the best one so far
    # Corruption of clean samples
    TIMESTEP = "level"
    NOISE = "noise"
    MASK = "mask"
    # Objectives
    PROMPT_DROPOUT = "drop"
    TEACHER_FORCED_PROMPT_DROPOUT = "untold"
    TOKEN_DROPOUT = "skip"
    RANDOM_CODE = "code"  # that replaces a context token
    OWN_TOKEN = "own"  # which context tokens are the sample's own
    FRAME = "frame"  # the frame that is decoded
    FIRST_GRADIENT_STEP = "first"
    GRID_INDEX = "place"  # on SRPO's training grid
    CONTRAST_NOISE = "grain"  # of SRPO's negative images
    # Training
    MINIBATCH_ORDER = "order"
    POSTERIOR_NOISE = "latents"  # of a variational autoencoder
    DROPOUT_POSITIONS = "dropout places"
    DROPOUT_FEATURES = "dropout features"
    SHUFFLED_REWARD = "shuffled"
    PAIR_ORDER = "pair order"  # in which a judge sees two samples
    # Data
    DATA_ORDER = "order"
    CROP = "crop"
    VIEW = "view"  # which encoded view of an image
    SHIFT = "shift"  # of CIFAR-10 images
    ANSWER = "answer"  # a token of a generated answer
    COLOR_DEVIATION = "picture"  # of a toy image from the exact shade of its color
    REJECTED_COLOR_DEVIATION = "rejected"
    WRONG_LABEL = "wrong label"  # of a like or a pair
    LIKED = "liked"  # whether a liked or a disliked sample is drawn, and which


@dataclass(frozen=True)
class Randomness:
    """A stateless random stream: the numbers of a row depend on seed, step, row number and purpose only.

    So resuming, sharding, micro-batches and dropping rows do not change the numbers of any other row.
    """

    seed: int
    step: int
    rows: Tensor  # [B] int64 global row numbers; random numbers are on the same device

    def __len__(self) -> int:
        return len(self.rows)

    def repeat(self, times: int) -> Self:
        """A stream with `times` adjacent rows for each row, all with different numbers."""
        copies = torch.arange(times, device=self.rows.device)
        return replace(self, rows=(self.rows[:, None] * times + copies).flatten())

    def same_for_all_rows(self) -> Self:
        """A stream with the same numbers for every row of every rank."""
        return replace(self, rows=torch.zeros_like(self.rows))

    def words(self, purpose: str, count: int, draw: int = 0) -> Tensor:
        """`count` random 32-bit words per row: [B, count] int64."""
        key = ((self.seed ^ (self.seed >> 32)) & WORD_MASK, self.step & WORD_MASK)
        # Fake tensors (planning) are a subclass of Tensor.
        if self.rows.is_cuda and type(self.rows) is Tensor and not torch.compiler.is_compiling():
            with torch.cuda.device(self.rows.device):
                return select_philox_kernel()(self.rows, count, zlib.crc32(purpose.encode()), draw & WORD_MASK, key)
        return philox_words_torch(self.rows, count, zlib.crc32(purpose.encode()), draw & WORD_MASK, key)

    def uniform(self, purpose: str, *shape: int, draw: int = 0) -> Tensor:
        """Uniform in [0, 1): [B, *shape] float32."""
        words = self.words(purpose, math.prod(shape), draw)
        return ((words >> 8).float() * 2.0**-24).view(len(self.rows), *shape)

    def normal(self, purpose: str, *shape: int, draw: int = 0) -> Tensor:
        """Standard normal by the Box-Muller transform: [B, *shape] float32."""
        count = math.prod(shape)
        pairs = math.ceil(count / 2)
        words = (self.words(purpose, 2 * pairs, draw) >> 8).float() * 2.0**-24
        radius = (-2 * torch.log(words[:, :pairs] + 2.0**-25)).sqrt()  # never log 0
        angle = words[:, pairs:] * (2 * math.pi)
        both = torch.cat([radius * torch.cos(angle), radius * torch.sin(angle)], 1)
        return both[:, :count].view(len(self.rows), *shape)

    def shared_uniform(self, purpose: str, draw: int = 0) -> float:
        """One uniform number in [0, 1) that all rows and ranks share."""
        one = replace(self, rows=torch.zeros(1, dtype=torch.int64))
        return float(one.uniform(purpose, 1, draw=draw))
