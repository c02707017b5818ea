"""Whether the text a picture was to show can be read from it (Flow-GRPO, Liu et al. 2025)."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar, Literal, Self

import torch
from pydantic import Field
from torch import Tensor

from ..core.reward import BatchSize, RewardCard
from ..core.types import Metadata, Placement, Prompts
from .backbones.ocr import OcrEngine, StubOcrEngine, normalize_text, text_similarity

QUOTED = re.compile(r'"([^"]*\S[^"]*)"')


@dataclass(frozen=True)
class Ocr:
    """1 - edits / letters between what an OCR engine reads and the fact `text`, or what the prompt puts in quotes; not
    below nought, whatever the case and the spaces. Of a clip every frame is read and the mean counts."""

    strict: bool = False  # what else is written counts as wrong; Flow-GRPO's own rule forgives it
    engine: Literal["rapidocr", "guess"] = "rapidocr"  # PP-OCRv6, or one that makes letters up, for tests
    enlarge: Annotated[int, Field(ge=0, le=2048)] = 160  # pixels a side that smaller pictures are brought to
    batch_size: BatchSize = 64
    about: ClassVar[RewardCard] = RewardCard(
        range="0 to 1",
        hacked_by="large plain letters; by the lenient rule also the word many times over",
        memory="15 MB",
    )
    differentiable: ClassVar[bool] = False
    reads: ClassVar[Literal["frames"]] = "frames"
    runs_on: ClassVar[Literal["host"]] = "host"

    def load(self, placement: Placement) -> OcrScorer:
        return OcrScorer(self, OcrEngine() if self.engine == "rapidocr" else StubOcrEngine())

    def tiny(self) -> Self:
        return replace(self, engine="guess")


@dataclass(frozen=True)
class OcrScorer:
    spec: Ocr
    engine: OcrEngine | StubOcrEngine

    def score(self, pixels: Tensor, prompts: Prompts, facts: Sequence[Metadata]) -> Tensor:
        wanted = [expected_text(prompt, fact) for prompt, fact in zip(prompts, facts, strict=True)]
        found = self.engine.read(pixels[:, 0], self.spec.enlarge)
        return torch.tensor([self._credit(*pair) for pair in zip(found, wanted, strict=True)])

    def _credit(self, found: str, wanted: str) -> float:
        forgiven = not self.spec.strict and wanted in found
        return 1.0 if forgiven else text_similarity(found, wanted)


def expected_text(prompt: str, fact: Metadata) -> str:
    """What a picture is to say."""
    quoted = QUOTED.search(prompt)
    text = normalize_text(str(fact.get("text") or (quoted[1] if quoted else "")))
    if not text:
        raise ValueError(f"'{prompt:.80}' asks for no text; expected some in quotes, or a fact 'text'")
    return text
