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
from .eyes import CLIP
from .flux_kontext import covering
from .nets.showo import Cache, Vocabulary
from .prompting import Speller
from .showo import PUBLISHED, Showo, ShowoBackbone

QUESTION = "USER: \n{} ASSISTANT:"  # as published, after codes
AFTER_FEATURES = "USER: {} ASSISTANT:"  # as LLaVA asks Phi; what was published could not be compared
SYSTEM = (
    "A chat between a curious user and an artificial intelligence assistant. "
    "The assistant gives helpful, detailed, and polite answers to the user's questions."
)  # likewise before features
Choose = Callable[[Tensor, Tensor], Tensor]  # the answer so far [B, n] and logits [B, words]: the greatest is next


def opened(vocabulary: Vocabulary, codes: Tensor) -> Tensor:
    """How a row begins whose picture is read by its codes [B, N]."""
    telling, end = (torch.full_like(codes[:, :1], mark) for mark in (vocabulary.telling, vocabulary.end))
    return torch.cat([telling, vocabulary.framed(codes), end], 1)


def laid_out(vocabulary: Vocabulary, opening: Tensor, texts: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
    """Ids of openings [B, n] and the texts after them, short ones filled on the left [B, L]; and who sees whom.

    Everybody sees the opening but for its last mark, and a text what came before in it. That filling moves a row does
    not matter, for the network knows places by how far they are apart alone.
    """
    longest = max(map(len, texts))
    padding = torch.tensor([longest - len(text) for text in texts], device=opening.device)
    rows = []
    for row, text in zip(opening, texts, strict=True):
        filling = row.new_full((longest - len(text),), vocabulary.filling)
        rows.append(torch.cat([filling, row, row.new_tensor(list(text))]))
    ids = torch.stack(rows)
    places, filled = torch.arange(ids.shape[1], device=ids.device), padding[:, None, None]
    asks, seen = places[None, :, None], places[None, None, :]
    before = (seen <= asks) | (seen < filled + opening.shape[1] - 1)
    return ids, torch.where(asks < filled, seen <= asks, before & (seen >= filled))[:, None]


class Teller:
    """Answers questions about pictures by the network of a generator."""

    def __init__(self, model: ShowoBackbone, spelled: Speller) -> None:
        self.model, self.spelled, self.vocabulary = model, spelled, model.vocabulary

    def shown(self, pixels: Tensor) -> tuple[Tensor, Tensor | None]:
        """How rows of pictures [B, 3, H, W] begin, and their features, if these are read in place of codes."""
        pixels, words = pixels.to(self.model.device), self.vocabulary
        if self.model.eyes is None:
            square = covering(pixels, *self.model.pixels[2:])
            return opened(words, self.model.encode(square[:, None])), None
        seen = self.model.eyes(pixels)
        before = [words.telling, *self.model.prompter.tokenizer(SYSTEM), words.opens]
        row = torch.tensor([*before, *[words.hidden] * seen.shape[1], words.closes], device=pixels.device)
        return row.expand(len(pixels), -1), seen

    def asked(self, questions: Sequence[str]) -> list[list[int]]:
        form = QUESTION if self.model.eyes is None else AFTER_FEATURES
        return [self.model.prompter.tokenizer(form.format(question)) for question in questions]

    @torch.no_grad()
    def answer(self, pixels: Tensor, questions: Sequence[str], tokens: int, choose: Choose | None = None) -> list[str]:
        """At most so many words each, the likeliest ones if nobody else is to choose."""
        opening, seen = self.shown(pixels)
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
            shown = torch.nn.functional.pad(~filled, (0, ids.shape[1] - length), value=True)[:, None, None]
            logits, fresh = self.model.net(
                word[:, None], shown, tokens=words, past=past, first=ids.shape[1] - 1, keep=True
            )
            past = longer(past, fresh)
        return [self.spelled(self.until_end(row)) for row in ids[:, length:].tolist()]

    def until_end(self, ids: Sequence[int]) -> list[int]:
        end = self.vocabulary.end
        return list(ids[: ids.index(end)] if end in ids else ids)

    def likelihood(self, pixels: Tensor, questions: Sequence[str], answers: Sequence[str]) -> Tensor:
        """Of the words of answers and of their end, after their questions: [B]."""
        asked = self.asked(questions)
        told = [[*self.model.prompter.tokenizer(f" {answer}"), self.vocabulary.end] for answer in answers]
        opening, seen = self.shown(pixels)
        ids, allowed = laid_out(self.vocabulary, opening, [a + b for a, b in zip(asked, told, strict=True)])
        longest = max(map(len, told))
        logits, _ = self.model.net(ids, allowed, places=slice(-longest - 1, -1), seen=seen)
        counts = torch.tensor([len(words) for words in told], device=ids.device)[:, None]
        counted = torch.arange(longest, 0, -1, device=ids.device) <= counts
        return (Categorical(logits).log_prob(ids[:, -longest:]) * counted).sum(1)


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
