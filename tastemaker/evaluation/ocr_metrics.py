"""WordEval scores: an OCR engine reads each sign; real signs of the same words to compare with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..core.randomness import Randomness
from ..core.types import Metadata, Prompts
from ..playground.signs import WORDS, SignPainter
from ..rewards.backbones.ocr import OcrEngine, normalize_text, text_similarity
from .detector_metrics import HELD_OUT_DETECTOR, PlayEvalScorer, load_playeval_scorer

OCR_SIZE = 256  # pixels a side; another one than the reward's, so that what is read at one size only counts for nothing


@dataclass(frozen=True)
class WordEvalScorer:
    """Marks signs; what they look like is a detector's affair, which never learned to read."""

    engine: OcrEngine
    eyes: PlayEvalScorer

    def mark(self, pixels: Tensor, prompts: Prompts, facts: Sequence[Metadata]) -> list[dict[str, Any]]:
        """Whether the word and nothing else was read, whether it was among what was read, and how near that was."""
        rows = []
        for found, fact in zip(self.engine.read(pixels[:, 0], OCR_SIZE), facts, strict=True):
            wanted = normalize_text(fact["text"])
            right = {"strict": float(found == wanted), "lenient": float(wanted in found)}
            rows.append({**right, "graded": text_similarity(found, wanted), "read": found})
        return rows

    def features(self, pixels: Tensor) -> Tensor:
        """What Frechet distances compare: [N, C]."""
        return self.eyes.features(pixels)

    def real(self, prompts: Prompts, facts: Sequence[Metadata], rows: Sequence[int]) -> Tensor:
        """True signs of the same words: [N, 1, 3, 64, 64]."""
        places = torch.tensor([WORDS.index(fact["text"]) for fact in facts])
        return SignPainter().paint(places, Randomness(1, 0, torch.tensor(list(rows))))


def load_wordeval_scorer(weights: str = HELD_OUT_DETECTOR, device: torch.device | str = "cpu") -> WordEvalScorer:
    return WordEvalScorer(OcrEngine(), load_playeval_scorer(weights, device))
