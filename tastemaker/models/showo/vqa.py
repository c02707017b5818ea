"""Visual question answering with Show-o: the image, then the dialogue; greedy answers and scores of given ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from ...core.distributions import Categorical
from ..image_backbone import resize_and_center_crop
from ..nets.showo import ShowoKVCache, ShowoVocabulary
from .prompt_tokenizer import Detokenizer

if TYPE_CHECKING:
    from .model import ShowoBackbone

QUESTION = "USER: \n{} ASSISTANT:"  # as published, after image tokens
QUESTION_AFTER_FEATURES = "USER: {} ASSISTANT:"  # LLaVA's template for Phi; there are no published outputs to compare
SYSTEM_PROMPT = (
    "A chat between a curious user and an artificial intelligence assistant. "
    "The assistant gives helpful, detailed, and polite answers to the user's questions."
)  # before image features
IMAGE_PLACEHOLDER = "<image>"  # in questions of other data sets; here the image always comes first
# Takes the answers so far [B, n] and the next logits [B, V], and returns logits; the largest is chosen.
ShowoLogitsProcessor = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class AnswerLogits:
    """Logits and token ids of answers, left-padded to the longest one."""

    logits: Tensor  # [B, A, V] of each answer token, given all tokens before it
    ids: Tensor  # [B, A] text tokens and the end of text
    mask: Tensor  # [B, A] bool, False at padding


def image_token_prefix(vocabulary: ShowoVocabulary, codes: Tensor) -> Tensor:
    """Ids that begin a sequence about an image given by its tokens [B, N]."""
    task, end = (torch.full_like(codes[:, :1], token) for token in (vocabulary.mmu_id, vocabulary.eos_id))
    return torch.cat([task, vocabulary.wrap_image_tokens(codes), end], 1)


def pack_image_text(
    vocabulary: ShowoVocabulary, prefix: Tensor, texts: Sequence[Sequence[int]]
) -> tuple[Tensor, Tensor]:
    """Ids [B, L] of image prefixes [B, n] and the texts after them, left-padded, and the attention mask [B, 1, L, L].

    Every position sees the prefix except for its last token, and text is causal. Left padding shifts positions, which
    changes nothing because rotary attention depends on distances only.
    """
    longest = max(map(len, texts))
    padding = torch.tensor([longest - len(text) for text in texts], device=prefix.device)
    sequences = []
    for row, text in zip(prefix, texts, strict=True):
        pad = row.new_full((longest - len(text),), vocabulary.pad_id)
        sequences.append(torch.cat([pad, row, row.new_tensor(list(text))]))
    ids = torch.stack(sequences)
    positions, num_padding = torch.arange(ids.shape[1], device=ids.device), padding[:, None, None]
    query, key = positions[None, :, None], positions[None, None, :]
    visible = (key <= query) | (key < num_padding + prefix.shape[1] - 1)
    return ids, torch.where(query < num_padding, key <= query, visible & (key >= num_padding))[:, None]


def encode_image_prefix(model: ShowoBackbone, pixels: Tensor) -> tuple[Tensor, Tensor | None]:
    """Ids that begin the sequences about images [B, 3, H, W], and image features if the model reads these."""
    pixels, vocabulary = pixels.to(model.device), model.vocabulary
    if model.vision_encoder is None:
        square = resize_and_center_crop(pixels, *model.pixels[2:])
        return image_token_prefix(vocabulary, model.encode(square[:, None])), None
    features = model.vision_encoder(pixels)
    before = [vocabulary.mmu_id, *model.prompt_tokenizer.tokenizer(SYSTEM_PROMPT), vocabulary.soi_id]
    ids = [*before, *[vocabulary.mask_id] * features.shape[1], vocabulary.eoi_id]
    return torch.tensor(ids, device=pixels.device).expand(len(pixels), -1), features


def tokenize_dialogue(model: ShowoBackbone, turns: Sequence[str]) -> list[int]:
    """Ids of a dialogue of questions and answers, which ends with a question."""
    first = QUESTION if model.vision_encoder is None else QUESTION_AFTER_FEATURES
    ids: list[int] = []
    for i, turn in enumerate(turns):
        if i % 2:
            ids += tokenize_answer(model, turn)
            continue
        question = turn if i else turn.replace(IMAGE_PLACEHOLDER, "").strip()
        template = QUESTION_AFTER_FEATURES if i else first
        ids += model.prompt_tokenizer.tokenizer(template.format(question))
    return ids


def tokenize_answer(model: ShowoBackbone, answer: str) -> list[int]:
    """Ids of an answer and of the end of text."""
    return [*model.prompt_tokenizer.tokenizer(f" {answer}"), model.vocabulary.eos_id]


def score_answers(
    model: ShowoBackbone, pixels: Tensor, turns: Sequence[Sequence[str]], answers: Sequence[str]
) -> AnswerLogits:
    """Logits of the last answer of each dialogue about images [B, 3, H, W]."""
    tokens = [tokenize_answer(model, answer) for answer in answers]
    prefix, features = encode_image_prefix(model, pixels)
    texts = [tokenize_dialogue(model, dialogue) + answer for dialogue, answer in zip(turns, tokens, strict=True)]
    ids, mask = pack_image_text(model.vocabulary, prefix, texts)
    longest = max(map(len, tokens))
    logits = model.net(ids, mask, positions=slice(-longest - 1, -1), image_features=features)[0]
    lengths = torch.tensor([len(answer) for answer in tokens], device=ids.device)[:, None]
    return AnswerLogits(logits, ids[:, -longest:], torch.arange(longest, 0, -1, device=ids.device) <= lengths)


class ShowoVqa:
    """Answers questions about images with a Show-o model."""

    def __init__(self, model: ShowoBackbone, detokenize: Detokenizer) -> None:
        self.model, self.detokenize, self.vocabulary = model, detokenize, model.vocabulary

    def encode_images(self, pixels: Tensor) -> tuple[Tensor, Tensor | None]:
        """Ids that begin the sequences about images, and image features if the model reads these."""
        return encode_image_prefix(self.model, pixels)

    def tokenize_questions(self, questions: Sequence[str]) -> list[list[int]]:
        return [tokenize_dialogue(self.model, [question]) for question in questions]

    @torch.no_grad()
    def answer(
        self,
        pixels: Tensor,
        questions: Sequence[str],
        max_new_tokens: int,
        logits_processor: ShowoLogitsProcessor | None = None,
    ) -> list[str]:
        """Greedy answers of at most `max_new_tokens` tokens."""
        prefix, features = encode_image_prefix(self.model, pixels)
        ids, mask = pack_image_text(self.vocabulary, prefix, self.tokenize_questions(questions))
        padding, text_ids = ids == self.vocabulary.pad_id, slice(0, self.vocabulary.text_vocab_size)
        last = {"positions": slice(-1, None), "vocabulary": text_ids, "use_cache": True}
        logits, past = self.model.net(ids, mask, **last, image_features=features)
        finished = torch.zeros(len(ids), dtype=torch.bool, device=ids.device)
        length = ids.shape[1]
        for _ in range(max_new_tokens):
            scores = logits[:, -1] if logits_processor is None else logits_processor(ids[:, length:], logits[:, -1])
            token = scores.argmax(-1).masked_fill(finished, self.vocabulary.eos_id)
            ids, finished = torch.cat([ids, token[:, None]], 1), finished | (token == self.vocabulary.eos_id)
            if bool(finished.all()):
                break
            visible = F.pad(~padding, (0, ids.shape[1] - length), value=True)[:, None, None]
            logits, new = self.model.net(token[:, None], visible, **last, past=past, start_position=ids.shape[1] - 1)
            past = append_kv_cache(past, new)
        return [self.detokenize(self.truncate_at_eos(answer)) for answer in ids[:, length:].tolist()]

    def truncate_at_eos(self, ids: Sequence[int]) -> list[int]:
        eos = self.vocabulary.eos_id
        return list(ids[: ids.index(eos)] if eos in ids else ids)

    def likelihood(self, pixels: Tensor, questions: Sequence[str], answers: Sequence[str]) -> Tensor:
        """Log-likelihood [B] of answers, with their end of text, after the questions."""
        scored = score_answers(self.model, pixels, [[question] for question in questions], answers)
        return (Categorical(scored.logits).log_prob(scored.ids) * scored.mask).sum(1)


def append_kv_cache(past: ShowoKVCache, new: ShowoKVCache) -> ShowoKVCache:
    """Keys and values of all positions so far."""
    return tuple(
        (torch.cat([keys, new_keys], 2), torch.cat([values, new_values], 2))
        for (keys, values), (new_keys, new_values) in zip(past, new, strict=True)
    )
