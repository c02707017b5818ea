"""Captions as six words in fixed places, and the small tower that reads them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..core.types import Metadata, Prompts
from .art import CLASSES, COLORS
from .captions import SceneCaptions, parse_captions
from .language import POSITION, RELATIONS

PLACES = (4, 1 + len(COLORS), len(CLASSES), 2 + len(RELATIONS), 1 + len(COLORS), 1 + len(CLASSES))
OFFSETS = tuple(sum(PLACES[:k]) for k in range(len(PLACES)))


def caption_words(captions: SceneCaptions) -> Tensor:
    """How many, colour, thing; 'and' or a relation, colour, thing; nought where a caption is silent: [N, 6]."""
    paired = captions.paired()
    link = torch.where(captions.task == POSITION, 2 + captions.relation, 1)
    columns = [
        captions.count - 1,
        captions.first_color,
        captions.first,
        torch.where(paired, link, 0),
        torch.where(paired, captions.second_color, 0),
        torch.where(paired, 1 + captions.second, 0),
    ]
    return torch.stack(columns, 1)


class CaptionEncoder(nn.Module):
    """Words [N, 6] as one vector [N, C]."""

    offsets: Tensor

    def __init__(self, width: int, out: int) -> None:
        super().__init__()
        self.word = nn.Embedding(sum(PLACES), width)
        self.first, self.second = nn.Linear(len(PLACES) * width, 4 * width), nn.Linear(4 * width, out)
        self.register_buffer("offsets", torch.tensor(OFFSETS), persistent=False)

    def forward(self, words: Tensor) -> Tensor:
        read = self.word(words + self.offsets).flatten(1)
        out: Tensor = self.second(F.silu(self.first(read)))
        return out


def requested_captions(prompts: Prompts, facts: Sequence[Metadata], device: torch.device) -> SceneCaptions:
    """What each row is to show: its metadata's own prompt, for what reaches a reward may have words put before it."""
    texts = [str(fact.get("prompt", prompt)) for prompt, fact in zip(prompts, facts, strict=True)]
    return parse_captions(texts).to(device)
