"""Caption features of T5 as LlamaGen uses them: [B, L, D] with the padding on the left."""

from __future__ import annotations

import html
import re
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from ..core.model_spec import EncoderFingerprint
from ..core.registry import ConfigError
from ..core.types import Metadata, Placement, Prompts
from .component_configs import FLAN_T5_BASE, FLAN_T5_XL, ComponentConfigs
from .pipeline_components import TINY, PipelineComponents
from .pretrained import WeightsSource
from .text_encoders import CachedTextEncoder, TextEncoder, TextEncoders

T5 = WeightsSource("google/flan-t5-xl", size="11 GB", license="Apache-2.0")
FEATURE_SIZE = 2048  # of flan-t5-xl
TINY_CONFIGS: ComponentConfigs = {
    "": {"vocab_size": 99, "d_model": 24, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2}
}
CONFIGS: dict[str, ComponentConfigs] = {T5.hub: {"": FLAN_T5_XL}, "google/flan-t5-base": {"": FLAN_T5_BASE}}
PUNCTUATION_MAP = str.maketrans("\u201c\u201d\u2018\u2019\u2013\u2014", "\"\"''--")  # typographic to ASCII
LINK = re.compile(r"\b(?:https?://|www\.)\S+")


def tiny_feature_size(name: str) -> int | None:
    """Return the feature size of the tiny random encoder; None for any other."""
    return int(TINY_CONFIGS[""]["d_model"]) if name == TINY else None


def clean_caption(caption: str) -> str:
    """Lowercase a caption and remove links, HTML and repeated spaces, as LlamaGen's training captions were cleaned."""
    text = LINK.sub("", html.unescape(html.unescape(caption)).lower())
    text = re.sub(r"<[^>]{0,200}>", "", text).translate(PUNCTUATION_MAP)
    return " ".join(text.split())


class T5CaptionEncoder(TextEncoders):
    """T5's last hidden states, features [B, L, D], and attention_mask [B, L] of real tokens; padding on the left."""

    def __init__(self, text_encoder: TextEncoder) -> None:
        self.text_encoder = text_encoder
        self.text_encoders = (self.text_encoder,)

    def __call__(self, prompts: list[str]) -> dict[str, Tensor]:
        captions = [clean_caption(prompt) for prompt in prompts]
        features = self.text_encoder(captions, use_attention_mask=True).last_hidden_state
        mask = self.text_encoder.tokenize(captions)["attention_mask"].bool()
        positions = torch.arange(mask.shape[1], device=mask.device)
        rotated = (positions + mask.sum(1, keepdim=True)) % mask.shape[1]  # moves padding from the right to the left
        features = features.gather(1, rotated[..., None].expand_as(features))
        attention_mask = mask.flip(1)
        return {"features": features * attention_mask[..., None], "attention_mask": attention_mask}


class CachedCaptionEncoder:
    """Caption features by prompt; empty prompts get the embedding that the network learned for them, if it has one."""

    def __init__(self, encoder: CachedTextEncoder, null_embedding: Tensor | None) -> None:
        self.encoder, self.null_embedding = encoder, null_embedding

    @property
    def max_cached_prompts(self) -> int:
        return self.encoder.max_cached_prompts

    @max_cached_prompts.setter
    def max_cached_prompts(self, count: int) -> None:
        self.encoder.max_cached_prompts = count

    @property
    def fingerprint(self) -> EncoderFingerprint:
        return dict(self.encoder.fingerprint)

    def keys(self, prompts: Prompts, metadata: Sequence[Metadata] = (), *, negative: bool = False) -> list[str]:
        return self.encoder.keys(prompts, metadata, negative=negative)

    def __call__(self, prompts: Prompts) -> dict[str, Tensor]:
        captions = [prompt for prompt in prompts if prompt.strip()]
        if self.null_embedding is None or len(captions) == len(prompts):
            return self.encoder(prompts)
        placement = self.encoder.placement
        null = self.null_embedding.to(placement.device)
        null_mask = torch.ones(len(null), dtype=torch.bool, device=placement.device)
        encoded = self.encoder(captions) if captions else {"features": torch.empty(0), "attention_mask": torch.empty(0)}
        rows = iter(zip(encoded["features"], encoded["attention_mask"], strict=True))
        pairs = [next(rows) if prompt.strip() else (null, null_mask) for prompt in prompts]
        return {
            "features": torch.stack([features.to(placement.dtype) for features, _ in pairs]),
            "attention_mask": torch.stack([mask for _, mask in pairs]),
        }


def build_caption_encoder(
    name: str, max_text_tokens: int, null_embedding: Tensor | None, placement: Placement, embeddings: Path | None
) -> CachedCaptionEncoder:
    """Build a caption encoder from a T5 folder or hub id; with precomputed embeddings, T5 need not be on disk."""

    def components() -> PipelineComponents:
        return PipelineComponents(name, T5, TINY_CONFIGS, placement, published_configs=CONFIGS)

    def load() -> T5CaptionEncoder:
        from transformers import T5EncoderModel

        return T5CaptionEncoder(components().load_text_encoder("", T5EncoderModel, "", max_text_tokens))

    fingerprint = {"model": "llamagen", "max_text_tokens": str(max_text_tokens)}
    try:
        if digest := components().text_encoder_digest(""):
            fingerprint["text_encoder"] = digest
    except ConfigError:
        if embeddings is None:
            raise
    return CachedCaptionEncoder(CachedTextEncoder(load, placement, fingerprint, embeddings), null_embedding)
