"""The one block all networks that look at scenes are made of, and the stem that brings pictures down to 8x8."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from .scenes import SIDE

GROUPS = 8


class ResidualBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.before, self.first = nn.GroupNorm(GROUPS, width), nn.Conv2d(width, width, 3, padding=1)
        self.between, self.second = nn.GroupNorm(GROUPS, width), nn.Conv2d(width, width, 3, padding=1)

    def forward(self, h: Tensor) -> Tensor:
        inner = self.first(F.silu(self.before(h)))
        out: Tensor = h + self.second(F.silu(self.between(inner)))
        return out


class Stem(nn.Module):
    """Pictures [N, 3, 64, 64] in [0, 1] as features at 16x16 and at 8x8; of clips, all frames in one as channels."""

    def __init__(self, widths: tuple[int, int, int], channels: int = 3) -> None:
        super().__init__()
        fine, middle, coarse = widths
        self.enter, self.seen = nn.Conv2d(channels, fine, 4, 2, 1), ResidualBlock(fine)
        self.narrow, self.known = nn.Conv2d(fine, middle, 4, 2, 1), ResidualBlock(middle)
        self.narrower = nn.Conv2d(middle, coarse, 3, 2, 1)
        self.whole = nn.Sequential(ResidualBlock(coarse), ResidualBlock(coarse))

    def forward(self, pixels: Tensor) -> tuple[Tensor, Tensor]:
        h = self.known(self.narrow(self.seen(self.enter(2 * pixels - 1))))
        return h, self.whole(self.narrower(h))


def first_frame(pixels: Tensor) -> Tensor:
    """The first frames of pixels [N, F, 3, H, W], at the size networks here look at: [N, 3, 64, 64]."""
    frame = pixels[:, 0]
    if frame.shape[-2:] == (SIDE, SIDE):
        return frame
    return F.interpolate(frame, size=(SIDE, SIDE), mode="bilinear", antialias=True)
