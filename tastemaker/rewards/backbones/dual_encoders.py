"""Networks of pictures and of texts whose features are compared: CLIP and its kin."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...core.types import Metadata, Prompts
from .preprocessing import Preprocessing

HELD = 4096  # texts of which the features are kept: 16 MB of a thousand numbers each

Inputs = dict[str, Any]
TokenizeTexts = Callable[[list[str], torch.device], Inputs]  # texts as token ids, where they are wanted


class TextFeatureCache:
    """Features of texts, which are computed once while they are among the latest asked for."""

    def __init__(self, read: Callable[[list[str]], Tensor], most: int = HELD) -> None:
        self.most = most
        self._read = read
        self._held: dict[str, Tensor] = {}  # the latest last

    def __call__(self, texts: Prompts) -> Tensor:
        """One row a text: [B, C]."""
        found = {text: self._held.pop(text, None) for text in dict.fromkeys(texts)}
        new = [text for text, row in found.items() if row is None]
        # Kept beyond this call, so neither its graph nor the marks of inference mode may stick to them.
        with torch.inference_mode(False), torch.no_grad():
            rows = {text: row for text, row in found.items() if row is not None}
            if new:
                rows |= zip(new, (row.clone() for row in self._read(new)), strict=True)
        self._held |= {text: rows[text] for text in found}
        while len(self._held) > self.most:
            self._held.pop(next(iter(self._held)))
        return torch.stack([rows[text] for text in texts])


@dataclass(frozen=True)
class ImagePreprocessing:
    """Pictures as most networks take them, enlarged beyond the size they were trained at where that is asked for."""

    preprocessing: Preprocessing
    beyond: bool = False

    def __call__(self, pixels: Tensor) -> Inputs:
        stretched: Inputs = {"interpolate_pos_encoding": True} if self.beyond else {}
        return {"pixel_values": self.preprocessing(pixels), **stretched}


@dataclass(frozen=True)
class CosineHead:
    """What is made of a cosine: scale * cosine + bias, or how probable that says a match is."""

    scale: float = 1.0
    bias: float = 0.0
    sigmoid: bool = False

    def __call__(self, cosine: Tensor) -> Tensor:
        logits = self.scale * cosine + self.bias
        return logits.sigmoid() if self.sigmoid else logits


class DualEncoderScorer:
    """A scorer by the angle between what a frozen network sees and what it reads."""

    def __init__(self, net: Any, prepare: Callable[[Tensor], Inputs], words: TokenizeTexts, ending: CosineHead) -> None:
        self.net, self.prepare, self.words, self.ending = net, prepare, words, ending
        self.texts = TextFeatureCache(self._features)

    def score(self, pixels: Tensor, prompts: Prompts, facts: Sequence[Metadata]) -> Tensor:
        return self.compare(self.see(pixels), prompts)

    def see(self, pixels: Tensor) -> Tensor:
        """Features of the first frame of each row, of length one: [B, C]."""
        inputs = self.prepare(pixels[:, 0])
        inputs["pixel_values"] = inputs["pixel_values"].to(self.net.dtype)
        return _unit(self.net.get_image_features(**inputs).pooler_output)

    def compare(self, seen: Tensor, prompts: Prompts) -> Tensor:
        return self.ending((seen * self.texts(prompts)).sum(1))

    def _features(self, texts: list[str]) -> Tensor:
        return _unit(self.net.get_text_features(**self.words(texts, self.net.device)).pooler_output)


def _unit(features: Tensor) -> Tensor:
    """Never in less than 32 bits: cosines of similar pictures differ by little."""
    return F.normalize(features.to(torch.promote_types(features.dtype, torch.float32)), dim=-1)
