"""Input sequences for questions about images in Show-o, and the logits of given answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from ..flux_kontext import resize_and_center_crop
from ..nets.showo import ShowoVocabulary
from .prompt_tokenizer import ShowoPromptTokenizer
from .vision_encoder import ClipVisionEncoder

QUESTION = "USER: \n{} ASSISTANT:"  # as published, after codes
QUESTION_AFTER_FEATURES = "USER: {} ASSISTANT:"  # as LLaVA asks Phi; what was published could not be compared
SYSTEM_PROMPT = (
    "A chat between a curious user and an artificial intelligence assistant. "
    "The assistant gives helpful, detailed, and polite answers to the user's questions."
)  # likewise before features
IMAGE_PLACEHOLDER = "<image>"  # where others' questions have the picture, which comes first here


class ShowoVqaModel(Protocol):
    """The parts of a Show-o backbone that image questions need."""

    net: nn.Module
    device: torch.device
    pixels: tuple[int, int, int, int]
    vocabulary: ShowoVocabulary
    prompter: ShowoPromptTokenizer
    eyes: ClipVisionEncoder | None

    def encode(self, pixels: Tensor) -> Tensor: ...


@dataclass(frozen=True)
class AnswerLogits:
    """Logits and token ids of answers, left-padded."""

    logits: Tensor  # [B, A, ids] of each place, by what is before it
    ids: Tensor  # [B, A] of words and of the end
    counted: Tensor  # [B, A] bool, what is no filling


def image_token_prefix(vocabulary: ShowoVocabulary, codes: Tensor) -> Tensor:
    """How a row begins whose picture is read by its codes [B, N]."""
    telling, end = (torch.full_like(codes[:, :1], mark) for mark in (vocabulary.telling, vocabulary.end))
    return torch.cat([telling, vocabulary.framed(codes), end], 1)


def pack_image_text(
    vocabulary: ShowoVocabulary, opening: Tensor, texts: Sequence[Sequence[int]]
) -> tuple[Tensor, Tensor]:
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


def encode_image_prefix(model: ShowoVqaModel, pixels: Tensor) -> tuple[Tensor, Tensor | None]:
    """How rows of pictures [B, 3, H, W] begin, and their features, if these are read in place of codes."""
    pixels, words = pixels.to(model.device), model.vocabulary
    if model.eyes is None:
        square = resize_and_center_crop(pixels, *model.pixels[2:])
        return image_token_prefix(words, model.encode(square[:, None])), None
    seen = model.eyes(pixels)
    before = [words.telling, *model.prompter.tokenizer(SYSTEM_PROMPT), words.opens]
    row = torch.tensor([*before, *[words.hidden] * seen.shape[1], words.closes], device=pixels.device)
    return row.expand(len(pixels), -1), seen


def tokenize_dialogue(model: ShowoVqaModel, turns: Sequence[str]) -> list[int]:
    """Ids of a question, or of question, answer, and so on up to the last question."""
    forms = [QUESTION if model.eyes is None else QUESTION_AFTER_FEATURES, QUESTION_AFTER_FEATURES]
    found: list[int] = []
    for i, turn in enumerate(turns):
        plain = turn.replace(IMAGE_PLACEHOLDER, "").strip() if i == 0 else turn
        found += tokenize_answer(model, turn) if i % 2 else model.prompter.tokenizer(forms[i > 0].format(plain))
    return found


def tokenize_answer(model: ShowoVqaModel, answer: str) -> list[int]:
    return [*model.prompter.tokenizer(f" {answer}"), model.vocabulary.end]


def score_answers(
    model: ShowoVqaModel, pixels: Tensor, turns: Sequence[Sequence[str]], said: Sequence[str]
) -> AnswerLogits:
    """Compute the logits of the last answer of each dialogue about images [B, 3, H, W]."""
    told = [tokenize_answer(model, answer) for answer in said]
    opening, seen = encode_image_prefix(model, pixels)
    texts = [tokenize_dialogue(model, before) + last for before, last in zip(turns, told, strict=True)]
    ids, allowed = pack_image_text(model.vocabulary, opening, texts)
    longest = max(map(len, told))
    logits = model.net(ids, allowed, places=slice(-longest - 1, -1), seen=seen)[0]
    counts = torch.tensor([len(words) for words in told], device=ids.device)[:, None]
    return AnswerLogits(logits, ids[:, -longest:], torch.arange(longest, 0, -1, device=ids.device) <= counts)
