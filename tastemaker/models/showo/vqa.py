"""Visual question answering with Show-o: image tokens, then the question, then greedy decoding."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...core.distributions import Categorical
from ..nets.showo import ShowoKVCache
from .answer_scoring import encode_image_prefix, pack_image_text, tokenize_dialogue
from .model import PUBLISHED, Showo, ShowoBackbone
from .prompt_tokenizer import Detokenizer
from .vision_encoder import CLIP

ShowoLogitsProcessor = Callable[
    [Tensor, Tensor], Tensor
]  # the answer so far [B, n] and logits [B, words]: the greatest is next


class ShowoVqa:
    """Answer questions about images with a Show-o model."""

    def __init__(self, model: ShowoBackbone, spelled: Detokenizer) -> None:
        self.model, self.spelled, self.vocabulary = model, spelled, model.vocabulary

    def shown(self, pixels: Tensor) -> tuple[Tensor, Tensor | None]:
        """How rows of pictures begin, and their features, if these are read in place of codes."""
        return encode_image_prefix(self.model, pixels)

    def asked(self, questions: Sequence[str]) -> list[list[int]]:
        return [tokenize_dialogue(self.model, [question]) for question in questions]

    @torch.no_grad()
    def answer(
        self, pixels: Tensor, questions: Sequence[str], tokens: int, choose: ShowoLogitsProcessor | None = None
    ) -> list[str]:
        """At most so many words each, the likeliest ones if nobody else is to choose."""
        opening, seen = encode_image_prefix(self.model, pixels)
        ids, allowed = pack_image_text(self.vocabulary, opening, self.asked(questions))
        filled, words = ids == self.vocabulary.filling, slice(0, self.vocabulary.words)
        logits, past = self.model.net(ids, allowed, places=slice(-1, None), tokens=words, keep=True, seen=seen)
        done = torch.zeros(len(ids), dtype=torch.bool, device=ids.device)
        length = ids.shape[1]
        for _ in range(tokens):
            scores = logits[:, -1] if choose is None else choose(ids[:, length:], logits[:, -1])
            word = scores.argmax(-1).masked_fill(done, self.vocabulary.end)
            ids, done = torch.cat([ids, word[:, None]], 1), done | (word == self.vocabulary.end)
            if bool(done.all()):
                break
            visible = torch.nn.functional.pad(~filled, (0, ids.shape[1] - length), value=True)[:, None, None]
            logits, fresh = self.model.net(
                word[:, None], visible, tokens=words, past=past, first=ids.shape[1] - 1, keep=True
            )
            past = append_kv_cache(past, fresh)
        return [self.spelled(self.until_end(row)) for row in ids[:, length:].tolist()]

    def until_end(self, ids: Sequence[int]) -> list[int]:
        end = self.vocabulary.end
        return list(ids[: ids.index(end)] if end in ids else ids)

    def likelihood(self, pixels: Tensor, questions: Sequence[str], answers: Sequence[str]) -> Tensor:
        """Of the words of answers and of their end, after their questions: [B]."""
        found = self.model.tell(pixels, [[question] for question in questions], answers)
        return (Categorical(found.logits).log_prob(found.ids) * found.counted).sum(1)


def append_kv_cache(past: ShowoKVCache, fresh: ShowoKVCache) -> ShowoKVCache:
    """Keys and values of all places so far."""
    return tuple(
        (torch.cat([keys, new[0]], 2), torch.cat([values, new[1]], 2))
        for (keys, values), new in zip(past, fresh, strict=True)
    )


def infer_showo_spec(name: str) -> Showo | None:
    """Infer the Show-o spec from a hub id or a local folder, or return None."""
    if name in PUBLISHED:
        return Showo(name, pixels=512 if "512" in name else 256, vision=CLIP.hub if "clip" in name else None)
    try:
        told: Any = json.loads((Path(name).expanduser() / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    if not isinstance(told, dict) or told.get("_class_name") != "Showo":
        return None
    vision = CLIP.hub if told.get("w_clip_vit") else None
    usual = Showo(name)
    side = math.isqrt(int(told.get("num_vq_tokens", 256)))
    return replace(usual, pixels=side * usual.downsample, vision=vision)
