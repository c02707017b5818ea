"""Whole answers of chat models that see, written token by token: the likeliest, or drawn by numbers of their own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...randomness import Randomness
from ...registry import ConfigError
from .answers import IMAGE
from .chat import Chat


@dataclass(frozen=True)
class Manner:
    """How an answer is written."""

    temperature: float = 0.0  # 0 takes the likeliest token
    top_p: float = 1.0  # draw from the fewest tokens that are so likely together
    tokens: int = 128  # at most
    seed: int = 0

    def __post_init__(self) -> None:
        if self.temperature < 0 or not 0 < self.top_p <= 1 or self.tokens < 1:
            found = f"temperature {self.temperature}, top-p {self.top_p} and {self.tokens} tokens"
            raise ConfigError(f"found {found}; expected at least 0, above 0 up to 1, and at least one token")


@dataclass(frozen=True)
class Drawn:
    """Logits with Gumbel noise, whose likeliest token is a draw; each row has its own, whoever is beside it."""

    manner: Manner
    rows: Tensor  # [B] the number of each row
    before: int = 0  # tokens of the question

    def __call__(self, ids: Tensor, logits: Tensor) -> Tensor:
        logits = logits.float() / self.manner.temperature
        ranked, places = logits.sort(descending=True)
        likely = ranked.softmax(-1)
        dropped = torch.zeros_like(logits, dtype=torch.bool)
        dropped.scatter_(1, places, likely.cumsum(-1) - likely >= self.manner.top_p)
        rng = Randomness(self.manner.seed, ids.shape[1] - self.before, self.rows)
        uniform = rng.uniform("answer", logits.shape[1]).clamp(1e-12, 1 - 1e-7)
        return logits.masked_fill(dropped, -torch.inf) - (-uniform.log()).log()


@torch.no_grad()
def replies(chat: Chat, pixels: Tensor, questions: Sequence[str], rows: Sequence[int], manner: Manner) -> list[str]:
    """What is answered about pictures [B, 3, H, W] of one size; `rows` number the draws."""
    asked = chat.speech.asked(pixels, [chat.speech.written((_shown(chat, question),)) for question in questions])
    length = asked.ids.shape[1]
    numbers = torch.tensor(rows, device=asked.ids.device)
    drawn: list[Any] = [Drawn(manner, numbers, length)] if manner.temperature else []
    written = chat.net.generate(
        asked.ids, attention_mask=asked.mask, **asked.more, max_new_tokens=manner.tokens, do_sample=False,
        logits_processor=drawn, temperature=None, top_p=None, top_k=None, pad_token_id=_filler(chat),
    )  # fmt: skip
    told: list[str] = chat.tokenizer.batch_decode(written[:, length:], skip_special_tokens=True)
    return [answer.strip() for answer in told]


def _shown(chat: Chat, question: str) -> str:
    return f"{IMAGE}\n{chat.plain(question)}"


def _filler(chat: Chat) -> int:
    found = chat.tokenizer.pad_token_id
    return int(chat.tokenizer.eos_token_id or 0) if found is None else int(found)
