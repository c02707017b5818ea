"""A taste for how pictures are made, whatever they show: learned from pairs of which one is damaged more."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from .blocks import GROUPS, Stem


class QualityScorer(nn.Module):
    widths: tuple[int, int, int] = (24, 48, 64)
    tiny: tuple[int, int, int] = (8, 8, 16)

    def __init__(self, widths: tuple[int, int, int] = widths) -> None:
        super().__init__()
        self.stem, self.near, self.norm = (
            Stem(widths),
            nn.GroupNorm(GROUPS, widths[1]),
            nn.GroupNorm(GROUPS, widths[2]),
        )
        self.fine, self.coarse = nn.Linear(widths[1], 1), nn.Linear(widths[2], 1)

    def forward(self, pixels: Tensor) -> Tensor:
        """The higher the better made, for pictures [N, 3, 64, 64]: [N]."""
        fine, coarse = self.stem(pixels)
        details = self.fine(F.silu(self.near(fine)).mean((2, 3)))
        out: Tensor = (details + self.coarse(F.silu(self.norm(coarse)).mean((2, 3)))).float()[:, 0]
        return out
