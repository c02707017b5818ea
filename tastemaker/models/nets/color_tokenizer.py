"""Tokens that need no training: the colour of each cell of a picture, to the nearest of a lattice of colours."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class ColorTokenizer(nn.Module):
    """Stands in for a tokenizer where none is given; `codes` beyond the largest cube are never used."""

    def __init__(self, codes: int, side: int, size: int) -> None:
        super().__init__()
        self.levels = max(level for level in range(2, 65) if level**3 <= codes)
        self.side, self.size = side, size

    def latents(self, pixels: Tensor) -> Tensor:
        """The colour of each cell, from -1 to 1: [N, 3, side, side] of [N, 3, H, W] in [0, 1]."""
        return 2 * F.adaptive_avg_pool2d(pixels.float(), self.side) - 1

    def vectors(self, ids: Tensor) -> Tensor:
        """The colours of tokens [N, side * side], from -1 to 1: [N, side * side, 3]."""
        return 2 * self._colours(ids) - 1

    def encode(self, pixels: Tensor) -> Tensor:
        """Tokens [N, side * side] of [N, 3, H, W] in [0, 1]."""
        cells = F.adaptive_avg_pool2d(pixels.float(), self.side).flatten(2)  # [N, 3, side * side]
        steps = (cells * (self.levels - 1)).round().long()
        return (steps[:, 0] * self.levels + steps[:, 1]) * self.levels + steps[:, 2]

    def decode(self, ids: Tensor) -> Tensor:
        """Pixels [N, 3, H, W] of square pictures."""
        side = math.isqrt(ids.shape[1])
        cells = self._colours(ids).transpose(1, 2).reshape(len(ids), 3, side, side)
        return F.interpolate(cells, (self.size, self.size))

    def _colours(self, ids: Tensor) -> Tensor:
        ids = ids % self.levels**3
        parts = (ids // self.levels**2, ids // self.levels % self.levels, ids % self.levels)
        return torch.stack(parts, 2).float() / (self.levels - 1)
