"""The control of every experiment: a reward from which nothing can be learned."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from ..core.randomness import Randomness
from ..core.reward import Reward, RewardSpec
from ..core.types import Metadata, Prompts
from .combinators import Combinator

EVERYONE = 2**20  # rows at once: a chunk by itself would be shuffled only within itself


@dataclass(frozen=True)
class Shuffled(Combinator):
    """Give each image the score of another image in the batch; with gradients, score it against another image's prompt.

    The order is drawn anew for every batch, from the pictures in it, so a resumed run draws the same.
    """

    of: RewardSpec

    @property
    def reads(self) -> Literal["frames", "clip"]:
        return self.of.reads

    @property
    def batch_size(self) -> int:
        return EVERYONE

    def through(self, inner: Reward, pixels: Tensor, prompts: Prompts, facts: Sequence[Metadata]) -> Tensor:
        frames = 1 + max((fact.get("frame", 0) for fact in facts), default=0)  # of one clip, which stay together
        others = [i * frames + k for i in derangement(pixels[::frames]) for k in range(frames)]
        if torch.is_grad_enabled() and pixels.requires_grad:
            # A sum of scores is the same in any order, and so is its gradient: here what is asked for must be wrong.
            return self._asked(inner, pixels, [prompts[i] for i in others], [facts[i] for i in others])
        return self._asked(inner, pixels, prompts, facts)[others]

    def _asked(self, inner: Reward, pixels: Tensor, prompts: Prompts, facts: Sequence[Metadata]) -> Tensor:
        parts = [slice(i, i + self.of.batch_size) for i in range(0, len(pixels), self.of.batch_size)]
        return torch.cat([inner.score(pixels[part], prompts[part], facts[part]) for part in parts])


def derangement(pixels: Tensor) -> list[int]:
    """For each row the number of another, all in one circle, so that nobody is left with his own."""
    if len(pixels) < 2:
        raise ValueError("a shuffled reward was asked about one picture alone; expected at least two to exchange")
    means = pixels.detach().float().flatten(1).mean(1).cpu()
    key = zlib.crc32(means.numpy().tobytes())
    circle = Randomness(0, key, torch.arange(len(pixels))).uniform("shuffled", 1).flatten().argsort()
    others = torch.empty_like(circle)
    others[circle] = circle.roll(-1)
    return [int(i) for i in others]
