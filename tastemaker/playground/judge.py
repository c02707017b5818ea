"""A judge that answers yes or no to a picture and its caption, and first whether it is clear enough to tell."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .blocks import GROUPS, ResidualBlock, Stem
from .caption_encoder import CaptionEncoder, caption_words
from .captions import SceneCaptions

CLEAR = 0.4  # noise level up to which a preview counts as clear


class YesNoJudge(nn.Module):
    widths: tuple[int, int, int, int] = (32, 80, 144, 64)  # of the stem, and of words
    tiny: tuple[int, int, int, int] = (8, 16, 16, 8)

    def __init__(self, widths: tuple[int, int, int, int] = widths) -> None:
        super().__init__()
        middle, coarse = widths[1:3]
        self.stem, self.reader = Stem(widths[:3]), CaptionEncoder(widths[3], 2 * middle + 2 * coarse)
        self.near, self.between = nn.GroupNorm(GROUPS, middle), nn.Conv2d(middle + 2, coarse, 3, 2, 1)
        self.far, self.after = nn.GroupNorm(GROUPS, coarse), ResidualBlock(coarse)
        self.norm, self.answer = nn.GroupNorm(GROUPS, coarse), nn.Linear(2 * coarse, 1)
        self.clear = nn.Linear(coarse, 1)
        self.split = [middle, middle, coarse, coarse]

    def forward(self, pixels: Tensor, captions: SceneCaptions) -> Tensor:
        """Logits of 'yes, this is it' and of 'it is clear' for pictures [N, 3, 64, 64]: [N, 2]."""
        fine, coarse = self.stem(pixels)
        read = self.reader(caption_words(captions))[..., None, None].split(self.split, 1)
        asked = torch.cat([F.silu(self.near(fine) * (1 + read[0]) + read[1]), places(fine)], 1)
        h = self.between(asked) + F.silu(self.far(coarse) * (1 + read[2]) + read[3])
        h = F.silu(self.norm(self.after(h)))
        yes = self.answer(torch.cat([h.mean((2, 3)), h.amax((2, 3))], 1))
        return torch.cat([yes, self.clear(coarse.mean((2, 3)))], 1).float()


def places(like: Tensor) -> Tensor:
    """Where each cell is, from -1 to 1: [N, 2, H, W]."""
    down, across = (torch.linspace(-1, 1, n, device=like.device, dtype=like.dtype) for n in like.shape[2:])
    return torch.stack(torch.meshgrid(down, across, indexing="ij")).expand(len(like), -1, -1, -1)
