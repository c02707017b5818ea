"""An image-text scorer in the shape of CLIP: two towers, and the score is linear in what the text one says."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .blocks import GROUPS, Stem
from .caption_encoder import CaptionEncoder, caption_words
from .captions import SceneCaptions

QUALITIES = ("", "crisp", "blurry", "noisy")  # words before a caption that are about the picture, not what it shows


class ImageTextScorer(nn.Module):
    widths: tuple[int, int, int, int] = (32, 80, 144, 256)  # of the stem, and of the space both towers meet in
    tiny: tuple[int, int, int, int] = (8, 16, 16, 16)

    def __init__(self, widths: tuple[int, int, int, int] = widths) -> None:
        super().__init__()
        self.stem, self.norm = Stem(widths[:3]), nn.GroupNorm(GROUPS, widths[2])
        self.squeeze = nn.Conv2d(widths[2], widths[0], 1)
        self.image = nn.Linear(widths[0] * 64, widths[3])
        self.reader = CaptionEncoder(widths[3] // 4, widths[3])
        self.quality = nn.Embedding(len(QUALITIES), widths[3])
        self.scale = nn.Parameter(torch.tensor(2.5))  # log of what similarities are multiplied by

    def see(self, pixels: Tensor) -> Tensor:
        """Pictures [N, 3, 64, 64] on the unit sphere: [N, C]."""
        h = self.squeeze(F.silu(self.norm(self.stem(pixels)[1])))
        return F.normalize(self.image(h.flatten(1)).float(), dim=1)

    def read(self, captions: SceneCaptions) -> Tensor:
        """Captions on the unit sphere: [N, C]."""
        return F.normalize(self.reader(caption_words(captions)).float(), dim=1)

    def judge_quality(self, seen: Tensor) -> Tensor:
        """How well each word of QUALITIES fits, none of them for nought: [N, 4]."""
        fits = seen @ F.normalize(self.quality.weight.float(), dim=1).T
        return torch.cat([torch.zeros_like(fits[:, :1]), fits[:, 1:]], 1)

    def forward(self, pixels: Tensor, captions: SceneCaptions, quality: Tensor) -> Tensor:
        """The cosine with the caption, plus that with the word before it: [N]."""
        seen = self.see(pixels)
        fits = self.judge_quality(seen).gather(1, quality[:, None])[:, 0]
        return (seen * self.read(captions)).sum(1) + fits


def split_quality(prompts: Sequence[str]) -> tuple[list[str], list[int]]:
    """Prompts such as 'crisp. a photo of a dog' without the word before the full stop, and its place in QUALITIES."""
    rest, places = [], []
    for prompt in prompts:
        before, stop, after = prompt.partition(". ")
        word = before.strip().lower() if stop else ""
        if word not in QUALITIES:
            known = ", ".join(QUALITIES[1:])
            raise ValueError(f"'{prompt:.80}' begins with '{word:.40}'; the playground's scorer knows {known}")
        rest.append(after if stop else prompt)
        places.append(QUALITIES.index(word))
    return rest, places
