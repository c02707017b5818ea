"""How surely the text a picture was to show is read from it, with gradients (Direct-Align's use of OCR)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar, Literal, Self

import torch
from pydantic import Field
from torch import Tensor

from ..core.reward import BatchSize, RewardCard
from ..core.types import Metadata, Placement, Prompts
from .backbones.ocr import OcrEngine, recognizer_file
from .backbones.text_recognition import (
    TextRecognizer,
    crop_quad,
    load_text_recognizer,
    prepare_line,
    random_text_recognizer,
)
from .ocr import expected_text

MOST = 8  # lines of text looked at in a picture


@dataclass(frozen=True)
class OcrGradient:
    """The log-likelihood a letter of the fact `text`, or of what the prompt puts in quotes, under PP-OCRv6, whatever
    the case and the spaces; of the lines of text found, all of them together and the whole picture, the best counts."""

    engine: Literal["rapidocr", "guess"] = "rapidocr"  # PP-OCRv6, or a random network, for tests
    find: bool = True  # lines of text, on the host; without it the picture is one line, as of a word that fills it
    enlarge: Annotated[int, Field(ge=0, le=2048)] = 160  # pixels a side that smaller pictures are brought to for that
    batch_size: BatchSize = 16
    about: ClassVar[RewardCard] = RewardCard(
        range="-20 to 0",
        hacked_by="large plain letters; grain that only the network reads",
        memory="0.2 GB",
    )
    differentiable: ClassVar[bool] = True
    reads: ClassVar[Literal["frames"]] = "frames"
    runs_on: ClassVar[Literal["device"]] = "device"

    def load(self, placement: Placement) -> OcrGradientScorer:
        if self.engine == "guess":
            return OcrGradientScorer(self, random_text_recognizer(placement.device), None)
        return OcrGradientScorer(
            self, load_text_recognizer(recognizer_file(), placement.device), OcrEngine() if self.find else None
        )

    def tiny(self) -> Self:
        return replace(self, engine="guess")


@dataclass(frozen=True)
class OcrGradientScorer:
    spec: OcrGradient
    speller: TextRecognizer
    finder: OcrEngine | None

    def score(self, pixels: Tensor, prompts: Prompts, facts: Sequence[Metadata]) -> Tensor:
        pictures = pixels[:, 0].float()
        wanted = [self.speller.known(expected_text(*row)) for row in zip(prompts, facts, strict=True)]
        with torch.autocast(pixels.device.type, enabled=False):
            parts = [self._lines(*row) for row in zip(pictures, wanted, strict=True)]
            said = iter(self.speller.read([each for lines in parts for each in lines]))
            rows = [self._best([next(said) for _ in lines], word) for lines, word in zip(parts, wanted, strict=True)]
        return torch.stack(rows).to(pixels.dtype)

    def _lines(self, picture: Tensor, word: str) -> list[Tensor]:
        """The whole picture, then the lines of text found in it, in the order they are read in."""
        found = [] if self.finder is None else self.finder.lines(picture, self.spec.enlarge)[:MOST]
        return [prepare_line(part, word) for part in (picture, *(crop_quad(picture, corners) for corners in found))]

    def _best(self, said: list[Tensor], word: str) -> Tensor:
        together = [torch.cat(said[1:])] if len(said) > 2 else []
        return torch.stack([self.speller.likelihood(each, word) for each in (*said, *together)]).max()
