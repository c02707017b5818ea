"""A vision-language judge: does an image match its prompt, and is a preview clear and promising?"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ..core.reward import Verdict
from ..core.types import Prompts
from .answer_generation import GenerationSettings, generate_answers
from .chat_model import ChatModel, ChatOutput
from .chat_processors import Conversation
from .yes_no import CLARITY, CRITIQUE, IMAGE, POTENTIAL, QUESTIONS, AnswerMode, AnswerTokens, YesNoAnswer, parse_answer


class YesNoModel(Protocol):
    """Whoever can be asked about pictures."""

    @property
    def words(self) -> AnswerTokens: ...

    def plain(self, prompt: str) -> str: ...
    def ask(self, pixels: Tensor, conversations: Sequence[Conversation], keep: bool = False) -> ChatOutput: ...
    def follow(self, heard: ChatOutput, rows: Tensor, answer: str, question: str) -> Tensor: ...


@dataclass(frozen=True)
class VlmJudge:
    chat: YesNoModel
    mode: AnswerMode
    sure: float  # probability from which a yes is one
    name: str = ""  # of the judge; without one, nobody is told that it does not answer

    def outcome(self, pixels: Tensor, prompts: Prompts, question: str) -> YesNoAnswer:
        """The answer to a question by name, or one with {prompt} in it, about pictures [B, 3, H, W]."""
        return self._understood(self._ask(pixels, prompts, QUESTIONS.get(question, question)).logits)

    def preview(self, pixels: Tensor, prompts: Prompts) -> Verdict:
        """Whether each can be judged yet, and whether those that can are promising, by how little of a no it is."""
        heard = self._ask(pixels, prompts, CLARITY, keep=True)
        clear = ~self._understood(heard.logits).denies
        promising, score = torch.zeros_like(clear), torch.zeros(len(clear), device=clear.device)
        rows = clear.nonzero().flatten()
        if len(rows):
            said = self._understood(self.chat.follow(heard, rows, "yes", POTENTIAL))
            promising[rows], score[rows] = said.agrees, 1 - said.cost
        return Verdict(clear, promising, score)

    def verdict(self, pixels: Tensor, prompts: Prompts, question: str, progress: float) -> Verdict:
        """Of previews as above, of finished pictures by the question; PRM's is asked of both."""
        if progress < 1 and question != "prm":
            return self.preview(pixels, prompts)
        said = self.outcome(pixels, prompts, question)
        return Verdict(torch.ones_like(said.agrees), said.agrees, said.score)

    def reasons(self, pixels: Tensor, prompts: Prompts, rows: int) -> list[str]:
        """What is wrong with finished pictures, in the likeliest words, so many of them at a time."""
        if not isinstance(self.chat, ChatModel):
            raise ValueError(f"{type(self.chat).__name__} answers in one word; expected a chat model that says why")
        told: list[str] = []
        for i in range(0, len(prompts), rows):
            part = slice(i, i + rows)
            asked = [CRITIQUE.replace("{prompt}", prompt) for prompt in prompts[part]]
            told += generate_answers(self.chat, pixels[part], asked, range(len(asked)), GenerationSettings(tokens=64))
        return told

    def _ask(self, pixels: Tensor, prompts: Prompts, question: str, keep: bool = False) -> ChatOutput:
        if not bool(pixels.isfinite().all()):
            raise ValueError("a judge was shown pictures with NaN or infinite pixels; expected numbers from 0 to 1")
        shown = question if IMAGE in question else f"{IMAGE}\n{question}"
        asked = [(shown.replace("{prompt}", self.chat.plain(prompt)),) for prompt in prompts]
        return self.chat.ask(pixels, asked, keep)

    def _understood(self, logits: Tensor) -> YesNoAnswer:
        words = self.chat.words
        if self.name and not set(logits.argmax(-1).tolist()) <= {*words.yes, *words.no}:
            warnings.warn(
                f"the judge '{self.name:.200}' answers neither yes nor no to some pictures, which then count by what "
                "its mode makes of that; ask another question, or teach it by `tastemaker train orm-onevision`",
                stacklevel=1,  # said once, whoever asks
            )
        return parse_answer(logits, words, self.mode, self.sure)
