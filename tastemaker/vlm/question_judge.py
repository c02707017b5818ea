"""Questions about images to a judge: the probabilities of given answers, or the answers as text.

`QuestionJudge` is what benchmarks ask. A judge behind an HTTP endpoint is one more subclass, in
`evaluation/endpoint_judge.py`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..core.registry import ConfigError
from ..core.types import Placement
from ..models.pretrained import WeightsSource, find_weights
from ..rewards.backbones.frozen_models import TINY, read_config
from .blip_vqa import BLIP_VQA, BlipVqa, load_blip_vqa
from .chat_model import ONE_VISION, ChatModel, load_chat_model
from .generation import ChatDecoderPool, GenerationSettings, generate_answers
from .yes_no import IMAGE

Spellings = tuple[str, ...]  # of one answer, such as yes, Yes and " yes"
YES: Spellings = ("yes", "Yes", " yes", " Yes")
NO: Spellings = ("no", "No", " no", " No")


@dataclass(frozen=True)
class JudgeQuestion:
    """A question about one image of a batch, with the answers whose probabilities are wanted."""

    image: int  # index in the batch
    text: str
    answers: tuple[Spellings, ...] = ()
    system: str = ""  # instructions, which judges without system messages read at the beginning of the text
    text_first: bool = False  # before the image, if the judge is asked with messages

    @property
    def full_text(self) -> str:
        return f"{self.system}\n\n{self.text}" if self.system else self.text


class QuestionJudge(ABC):
    """A vision-language model that is asked about images."""

    deterministic: bool = True  # asking again gives the same text, so an answer that cannot be parsed stays so
    short_questions: bool = False  # it was trained on questions of a few words, without instructions

    def __init__(self, name: str, batch_size: int = 8) -> None:
        self.name, self.batch_size = name, batch_size  # the name is written into reports

    @abstractmethod
    def probabilities(
        self, pixels: Tensor, texts: Sequence[str], answers: Sequence[tuple[Spellings, ...]]
    ) -> list[tuple[float, ...]]:
        """Probability of each answer among all first tokens, for one question about each image of [B, 3, H, W].

        A judge that returns texts only gives 1 to the answer that it wrote and 0 to the others.
        """

    @abstractmethod
    def texts(self, pixels: Tensor, texts: Sequence[str], max_new_tokens: int) -> list[str]:
        """Answer to one question about each image of [B, 3, H, W], without sampling."""

    def ask_probabilities(self, pixels: Tensor, questions: Sequence[JudgeQuestion]) -> list[tuple[float, ...]]:
        """Probabilities of the answers to several questions about images [N, 3, H, W], in batches."""
        probabilities: list[tuple[float, ...]] = []
        for batch in self._batches(questions):
            images = pixels[[question.image for question in batch]]
            texts, answers = [question.full_text for question in batch], [question.answers for question in batch]
            probabilities += self.probabilities(images, texts, answers)
        return probabilities

    def ask_texts(
        self, pixels: Tensor, questions: Sequence[JudgeQuestion], max_new_tokens: int, attempt: int = 0
    ) -> list[str]:
        """Texts that answer several questions about images [N, 3, H, W], in batches.

        `attempt` counts how often the same questions were asked before, for judges that sample another answer then.
        """
        answers: list[str] = []
        for batch in self._batches(questions):
            images = pixels[[question.image for question in batch]]
            answers += self.texts(images, [question.full_text for question in batch], max_new_tokens)
        return answers

    def _batches(self, questions: Sequence[JudgeQuestion]) -> list[Sequence[JudgeQuestion]]:
        return [questions[i : i + self.batch_size] for i in range(0, len(questions), self.batch_size)]


class WordTokens:
    """The tokens of an answer's spellings. A spelling of several tokens has none: its first token is another word."""

    def __init__(self, tokenizer: Any, name: str) -> None:
        self.tokenizer, self.name = tokenizer, name
        self._tokens: dict[Spellings, list[int]] = {}

    def __call__(self, spellings: Spellings) -> list[int]:
        if spellings not in self._tokens:
            encoded = [self.tokenizer(text, add_special_tokens=False).input_ids for text in spellings]
            self._tokens[spellings] = list(dict.fromkeys(ids[0] for ids in encoded if len(ids) == 1))
        if not self._tokens[spellings]:
            raise ConfigError(
                f"--judge: {self.name:.200} does not have a token for '{spellings[0]}', so its probability is not "
                "known; use another judge [TM2150]"
            )
        return self._tokens[spellings]

    def sum_probabilities(self, logits: Tensor, answers: Sequence[tuple[Spellings, ...]]) -> list[tuple[float, ...]]:
        """Sum the softmax of logits [B, V] over the spellings of each answer."""
        probabilities = logits.float().softmax(-1)
        return [
            tuple(float(row[self(spellings)].sum()) for spellings in each)
            for row, each in zip(probabilities, answers, strict=True)
        ]


class ChatQuestionJudge(QuestionJudge):
    """A chat model of transformers, asked with one forward pass per probability."""

    def __init__(self, chat: ChatModel, device: torch.device, name: str, batch_size: int = 8) -> None:
        super().__init__(name, batch_size)
        self.chat, self.device = chat, device
        self.tokens = WordTokens(chat.tokenizer, name)
        self.decoder_pool = ChatDecoderPool(chat.net, chat.processor, "eager")

    @torch.no_grad()
    def probabilities(
        self, pixels: Tensor, texts: Sequence[str], answers: Sequence[tuple[Spellings, ...]]
    ) -> list[tuple[float, ...]]:
        conversations = [(f"{IMAGE}\n{self.chat.strip_special_tokens(text)}",) for text in texts]
        logits = self.chat.ask(pixels.to(self.device), conversations).logits
        return self.tokens.sum_probabilities(logits, answers)

    def texts(self, pixels: Tensor, texts: Sequence[str], max_new_tokens: int) -> list[str]:
        settings = GenerationSettings(max_new_tokens=max_new_tokens)
        pixels, ids = pixels.to(self.device), range(len(texts))
        return generate_answers(self.chat, pixels, texts, ids, settings, decoder_pool=self.decoder_pool)


class BlipQuestionJudge(QuestionJudge):
    """BLIP for visual question answering, whose answers are short texts in lower case."""

    short_questions = True

    def __init__(self, vqa: BlipVqa, device: torch.device, name: str, batch_size: int = 8) -> None:
        super().__init__(name, batch_size)
        self.vqa, self.device, self.tokens = vqa, device, WordTokens(vqa.tokenizer, name)

    def probabilities(
        self, pixels: Tensor, texts: Sequence[str], answers: Sequence[tuple[Spellings, ...]]
    ) -> list[tuple[float, ...]]:
        return self.tokens.sum_probabilities(self.vqa.first_logits(pixels.to(self.device), texts), answers)

    def texts(self, pixels: Tensor, texts: Sequence[str], max_new_tokens: int) -> list[str]:
        return self.vqa.answer(pixels.to(self.device), texts, max_new_tokens)


def load_question_judge(
    weights: str, placement: Placement, batch_size: int = 8, *, blip: bool = False
) -> QuestionJudge:
    """A judge by folder or hub id: BLIP-VQA if its config.json says so, else a chat model; `tiny` is a random one."""
    device = placement.device
    if weights == TINY:
        if blip:
            return BlipQuestionJudge(load_blip_vqa(TINY, placement), device, "tiny BLIP-VQA", batch_size)
        return ChatQuestionJudge(load_chat_model(TINY, placement), device, TINY, batch_size)
    source = next((each for each in (BLIP_VQA, ONE_VISION) if each.hub == weights), WeightsSource(weights))
    if read_config(find_weights(weights, source)).get("model_type") == "blip":
        return BlipQuestionJudge(load_blip_vqa(weights, placement), device, weights, batch_size)
    return ChatQuestionJudge(load_chat_model(weights, placement), device, weights, batch_size)
