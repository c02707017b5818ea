"""Captions as LlamaGen reads them: the features of T5 for each word, the filling before them."""

from __future__ import annotations

import html
import re
from pathlib import Path

import torch
from torch import Tensor

from ..core.registry import ConfigError
from ..core.types import Placement, Prompts
from .cached_text_encoder import text_encoder_digest
from .pipeline_components import TINY, PipelineComponents
from .pretrained import WeightsSource
from .text_encoders import CachedTextEncoder, TextEncoder

T5 = WeightsSource("google/flan-t5-xl", size="11 GB", licence="Apache-2.0")
FEATURE_SIZE = 2048  # of a word
SMALL = {"": {"vocab_size": 99, "d_model": 24, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2}}
PUNCTUATION_MAP = str.maketrans(
    "\u201c\u201d\u2018\u2019\u2013\u2014", "\"\"''--"
)  # of printers, as typists write them
LINK = re.compile(r"\b(?:https?://|www\.)\S+")


def tiny_feature_size(name: str) -> int | None:
    """The features of the small random encoder; none of another."""
    return int(SMALL[""]["d_model"]) if name == TINY else None


def clean_caption(caption: str) -> str:
    """A caption in small letters, without links, marks of HTML and needless space, as the encoder was given them."""
    text = LINK.sub("", html.unescape(html.unescape(caption)).lower())
    text = re.sub(r"<[^>]{0,200}>", "", text).translate(PUNCTUATION_MAP)
    return " ".join(text.split())


class T5CaptionEncoder:
    """The last features of a T5 encoder, [B, words, features], and which are of words: [B, words]."""

    def __init__(self, reader: TextEncoder) -> None:
        self.reader = reader

    def __call__(self, texts: list[str]) -> dict[str, Tensor]:
        said = [clean_caption(text) for text in texts]
        features = self.reader(said, masked=True).last_hidden_state
        mask = self.reader.tokens(said)["attention_mask"].bool()
        places = torch.arange(mask.shape[1], device=mask.device)
        turned = (places + mask.sum(1, keepdim=True)) % mask.shape[1]  # words to the end, filling before them
        features = features.gather(1, turned[..., None].expand_as(features))
        shown = mask.flip(1)
        return {"features": features * shown[..., None], "shown": shown}


class CachedCaptionEncoder:
    """Prompts by their features; none at all by what the network learned for it."""

    def __init__(self, read: CachedTextEncoder, nothing: Tensor | None) -> None:
        self.read, self.nothing = read, nothing

    @property
    def most(self) -> int:
        return self.read.most

    @most.setter
    def most(self, most: int) -> None:
        self.read.most = most

    @property
    def made_by(self) -> dict[str, str]:
        return dict(self.read.made_by)

    def __call__(self, prompts: Prompts) -> dict[str, Tensor]:
        if self.nothing is None or all(prompt.strip() for prompt in prompts):
            return self.read(prompts)
        where, nothing = self.read.placement.device, self.nothing.to(self.read.placement.device)
        told = iter(zip(*self._told([prompt for prompt in prompts if prompt.strip()]), strict=True))
        shown = torch.ones(len(nothing), dtype=torch.bool, device=where)
        rows = [next(told) if prompt.strip() else (nothing, shown) for prompt in prompts]
        dtype = self.read.placement.dtype
        return {
            "features": torch.stack([features.to(dtype) for features, _ in rows]),
            "shown": torch.stack([mask for _, mask in rows]),
        }

    def _told(self, prompts: list[str]) -> tuple[Tensor, ...]:
        if not prompts:
            return (torch.empty(0), torch.empty(0))
        found = self.read(prompts)
        return found["features"], found["shown"]


def build_caption_encoder(
    name: str, words: int, nothing: Tensor | None, placement: Placement, embeddings: Path | None
) -> CachedCaptionEncoder:
    """Those that read captions with an encoder, or find them on a shelf, where it need not be here."""

    def kit() -> PipelineComponents:
        return PipelineComponents(name, T5, SMALL, placement)

    def load() -> T5CaptionEncoder:
        from transformers import T5EncoderModel

        return T5CaptionEncoder(kit().reader("", T5EncoderModel, "", words))

    made_by = {"model": "llamagen", "words": str(words)}
    try:
        if digest := text_encoder_digest(kit(), ""):
            made_by["text_encoder"] = digest
    except ConfigError:
        if embeddings is None:
            raise
    return CachedCaptionEncoder(CachedTextEncoder(load, placement, made_by, embeddings), nothing)
