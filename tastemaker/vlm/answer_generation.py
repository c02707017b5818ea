"""Whole answers of chat models that see, written token by token: the likeliest, or drawn by numbers of their own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..core.randomness import Randomness
from ..core.registry import ConfigError
from .chat_model import ChatModel
from .decoding import ChatDecoderPool, ChatLogitsProcessor, TokenCallback
from .yes_no import IMAGE

AnswerCallback = Callable[[str], None]  # hears what is new of an answer
UNSURE = "\N{REPLACEMENT CHARACTER}"  # part of a letter whose other bytes are to come


@dataclass(frozen=True)
class GenerationSettings:
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
class GumbelSampling:
    """Logits with Gumbel noise, whose likeliest token is a draw; each row has its own, whoever is beside it."""

    manner: GenerationSettings
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


class AnswerStreamer:
    """Says the answer of the first row aloud as it grows; what was said stays, so half letters and spaces wait."""

    def __init__(self, spell: Callable[[Tensor], str], aloud: AnswerCallback) -> None:
        self.spell, self.aloud, self.said = spell, aloud, ""

    def __call__(self, ids: Tensor) -> None:
        self.until(self.spell(ids[0]).strip().rstrip(UNSURE).rstrip())

    def until(self, text: str) -> None:
        if text.startswith(self.said) and len(text) > len(self.said):
            self.aloud(text[len(self.said) :])
            self.said = text


class TokenStreamer:
    """The tokens of `generate`, gathered as they come."""

    def __init__(self, tell: TokenCallback) -> None:
        self.tell, self.rows = tell, torch.zeros(0, 0, dtype=torch.long)

    def put(self, ids: Tensor) -> None:
        if ids.ndim == 1:  # the first call holds the question
            self.rows = torch.cat([self.rows.view(len(ids), -1), ids[:, None].cpu()], 1)
            self.tell(self.rows)

    def end(self) -> None:
        """All is told."""


@torch.no_grad()
def generate_answers(
    chat: ChatModel, pixels: Tensor, questions: Sequence[str], rows: Sequence[int], manner: GenerationSettings,
    aloud: AnswerCallback | None = None, desk: ChatDecoderPool | None = None,
) -> list[str]:  # fmt: skip
    """What is answered about pictures [B, 3, H, W] of one size; `rows` number the draws.

    `aloud` hears the first answer as it is written; a `desk` that stays writes the next batch faster.
    """
    asked = chat.speech.asked(pixels, [chat.speech.written((_shown(chat, question),)) for question in questions])
    length, desk = asked.ids.shape[1], desk or ChatDecoderPool(chat.net, chat.speech, "steps")
    numbers = torch.tensor(rows, device=asked.ids.device)
    drawn: list[ChatLogitsProcessor] = [GumbelSampling(manner, numbers, length)] if manner.temperature else []
    spoken = AnswerStreamer(lambda ids: _spelled(chat, ids[None])[0], aloud) if aloud else None
    if desk.fits(asked, manner.tokens):
        written = desk.write(asked, manner.tokens, _filler(chat), [*_settled(chat), *drawn], spoken)
    else:
        told: list[Any] = [*drawn]
        written = chat.net.generate(
            asked.ids, attention_mask=asked.mask, **asked.more, max_new_tokens=manner.tokens, do_sample=False,
            logits_processor=told, temperature=None, top_p=None, top_k=None, pad_token_id=_filler(chat),
            streamer=TokenStreamer(spoken) if spoken else None,
        )[:, length:]  # fmt: skip
    answers = [answer.strip() for answer in _spelled(chat, written)]
    if spoken is not None:
        spoken.until(answers[0])
    return answers


def _spelled(chat: ChatModel, ids: Tensor) -> list[str]:
    found: list[str] = chat.tokenizer.batch_decode(ids, skip_special_tokens=True)
    return found


def _settled(chat: ChatModel) -> list[ChatLogitsProcessor]:
    """What a model's own settings change in its logits."""
    penalty = chat.net.generation_config.repetition_penalty
    if penalty in (None, 1.0):
        return []
    from transformers import RepetitionPenaltyLogitsProcessor

    less: Any = RepetitionPenaltyLogitsProcessor(penalty=penalty)
    return [less]


def _shown(chat: ChatModel, question: str) -> str:
    return f"{IMAGE}\n{chat.plain(question)}"


def _filler(chat: ChatModel) -> int:
    found = chat.tokenizer.pad_token_id
    return int(chat.tokenizer.eos_token_id or 0) if found is None else int(found)
