"""WordEval's examiner: an OCR engine that reads each sign, and real signs of the same words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..ocr import Engine, likeness, plain
from ..playground.words import WORDS, SignPainter
from ..randomness import Randomness
from ..types import Facts, Prompts
from .examiner import HELD_OUT, Examiner, examiner

ENLARGE = 256  # pixels a side; another one than the reward's, so that what is read at one size only counts for nothing


@dataclass(frozen=True)
class Proofreader:
    """Marks signs; what they look like is a detector's affair, which never learned to read."""

    engine: Engine
    eyes: Examiner

    def mark(self, pixels: Tensor, prompts: Prompts, facts: Sequence[Facts]) -> list[dict[str, Any]]:
        """Whether the word and nothing else was read, whether it was among what was read, and how near that was."""
        rows = []
        for found, fact in zip(self.engine.read(pixels[:, 0], ENLARGE), facts, strict=True):
            wanted = plain(fact["text"])
            right = {"strict": float(found == wanted), "lenient": float(wanted in found)}
            rows.append({**right, "graded": likeness(found, wanted), "read": found})
        return rows

    def features(self, pixels: Tensor) -> Tensor:
        """What Frechet distances compare: [N, C]."""
        return self.eyes.features(pixels)

    def real(self, prompts: Prompts, facts: Sequence[Facts], rows: Sequence[int]) -> Tensor:
        """True signs of the same words: [N, 1, 3, 64, 64]."""
        places = torch.tensor([WORDS.index(fact["text"]) for fact in facts])
        return SignPainter().paint(places, Randomness(1, 0, torch.tensor(list(rows))))


def proofreader(weights: str = HELD_OUT, device: torch.device | str = "cpu") -> Proofreader:
    return Proofreader(Engine(), examiner(weights, device))
