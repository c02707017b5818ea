"""What Show-o says of pictures: it reads their codes, then a question, and writes the answer word by word."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..distributions import Categorical
from .answering import asked, laid_out, shown
from .eyes import CLIP
from .nets.showo import Cache
from .prompting import Speller
from .showo import PUBLISHED, Showo, ShowoBackbone

Choose = Callable[[Tensor, Tensor], Tensor]  # the answer so far [B, n] and logits [B, words]: the greatest is next


class Teller:
    """Answers questions about pictures by the network of a generator."""

    def __init__(self, model: ShowoBackbone, spelled: Speller) -> None:
        self.model, self.spelled, self.vocabulary = model, spelled, model.vocabulary

    def shown(self, pixels: Tensor) -> tuple[Tensor, Tensor | None]:
        """How rows of pictures begin, and their features, if these are read in place of codes."""
        return shown(self.model, pixels)

    def asked(self, questions: Sequence[str]) -> list[list[int]]:
        return [asked(self.model, [question]) for question in questions]

    @torch.no_grad()
    def answer(self, pixels: Tensor, questions: Sequence[str], tokens: int, choose: Choose | None = None) -> list[str]:
        """At most so many words each, the likeliest ones if nobody else is to choose."""
        opening, seen = shown(self.model, pixels)
        ids, allowed = laid_out(self.vocabulary, opening, self.asked(questions))
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
            past = longer(past, fresh)
        return [self.spelled(self.until_end(row)) for row in ids[:, length:].tolist()]

    def until_end(self, ids: Sequence[int]) -> list[int]:
        end = self.vocabulary.end
        return list(ids[: ids.index(end)] if end in ids else ids)

    def likelihood(self, pixels: Tensor, questions: Sequence[str], answers: Sequence[str]) -> Tensor:
        """Of the words of answers and of their end, after their questions: [B]."""
        found = self.model.tell(pixels, [[question] for question in questions], answers)
        return (Categorical(found.logits).log_prob(found.ids) * found.counted).sum(1)


def longer(past: Cache, fresh: Cache) -> Cache:
    """Keys and values of all places so far."""
    return tuple(
        (torch.cat([keys, new[0]], 2), torch.cat([values, new[1]], 2))
        for (keys, values), new in zip(past, fresh, strict=True)
    )


def spec(name: str) -> Showo | None:
    """What the name of a Show-o says of it."""
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
