"""A vision-language judge: does an image match its prompt, and is a preview clear and promising?"""

from __future__ import annotations

import warnings
from dataclasses import dataclass

import torch
from torch import Tensor

from ..core.reward import Verdict
from ..core.types import Prompts
from .chat_model import ChatOutput, YesNoModel
from .generation import GenerationSettings
from .yes_no import CLARITY, CRITIQUE, IMAGE, POTENTIAL, QUESTIONS, AnswerMode, YesNoAnswer, parse_answer


@dataclass(frozen=True)
class VlmJudge:
    model: YesNoModel
    mode: AnswerMode
    threshold: float  # probability of yes from which the answer is yes
    name: str = ""  # for the warning about answers that are neither yes nor no; no warning if empty

    def judge_finished(self, pixels: Tensor, prompts: Prompts, question: str) -> YesNoAnswer:
        """Answers about images [B, 3, H, W] to a question by its name, or to a text with {prompt} in it."""
        return self._parse(self._ask(pixels, prompts, QUESTIONS.get(question, question)).logits)

    def judge_preview(self, pixels: Tensor, prompts: Prompts) -> Verdict:
        """Whether previews are clear enough to judge, and whether the clear ones are promising (PARM)."""
        output = self._ask(pixels, prompts, CLARITY, keep_cache=True)
        clear = ~self._parse(output.logits).is_no
        promising, score = torch.zeros_like(clear), torch.zeros(len(clear), device=clear.device)
        indices = clear.nonzero().flatten()
        if len(indices):
            answer = self._parse(self.model.ask_followup(output, indices, "yes", POTENTIAL))
            promising[indices], score[indices] = answer.is_yes, 1 - answer.cost
        return Verdict(clear, promising, score)

    def judge(self, pixels: Tensor, prompts: Prompts, question: str, progress: float) -> Verdict:
        """Judge previews by their potential and finished images by the question; `prm` asks its question of both."""
        if progress < 1 and question != "prm":
            return self.judge_preview(pixels, prompts)
        answer = self.judge_finished(pixels, prompts, question)
        return Verdict(torch.ones_like(answer.is_yes), answer.is_yes, answer.score)

    def explain(self, pixels: Tensor, prompts: Prompts, batch_size: int) -> list[str]:
        """What does not match the prompt in each finished image, in one greedy sentence."""
        critiques: list[str] = []
        for i in range(0, len(prompts), batch_size):
            questions = [CRITIQUE.replace("{prompt}", prompt) for prompt in prompts[i : i + batch_size]]
            critiques += self.model.explain(
                pixels[i : i + batch_size], questions, range(len(questions)), GenerationSettings(max_new_tokens=64)
            )
        return critiques

    def _ask(self, pixels: Tensor, prompts: Prompts, question: str, keep_cache: bool = False) -> ChatOutput:
        if not bool(pixels.isfinite().all()):
            raise ValueError("a judge got images with NaN or infinite pixels; pass pixels from 0 to 1 [TM713]")
        template = question if IMAGE in question else f"{IMAGE}\n{question}"
        questions = [(template.replace("{prompt}", self.model.strip_special_tokens(prompt)),) for prompt in prompts]
        return self.model.ask(pixels, questions, keep_cache)

    def _parse(self, logits: Tensor) -> YesNoAnswer:
        tokens = self.model.answer_tokens
        if self.name and not set(logits.argmax(-1).tolist()) <= {*tokens.yes, *tokens.no}:
            warnings.warn(
                f"the judge '{self.name:.200}' answered neither yes nor no for some images, and these answers are "
                "scored too; ask another question, or fine-tune the judge with `tastemaker train orm-onevision` "
                "[TM714]",
                stacklevel=1,  # the same place for every caller, so that it is shown once
            )
        return parse_answer(logits, tokens, self.mode, self.threshold)
