"""Yes or no from a chat model that sees: a reward, and a judge of previews (ORM and PARM, Guo et al. 2025)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal, Self

import torch
from torch import Tensor

from ..core.reward import BatchSize, RewardCard, Verdict
from ..core.types import Metadata, Placement, Prompts, concatenate
from ..vlm.chat_model import ONE_VISION, load_chat_model
from ..vlm.judge import VlmJudge
from ..vlm.yes_no import QUESTIONS, AnswerMode
from .backbones.loading import TINY


@dataclass(frozen=True)
class Vlm:
    """The probability of `yes` to a question about the picture: LLaVA-OneVision, Qwen-VL, PaliGemma or another family.

    `yes_no_logits`: of yes against no, in any spelling; `full_softmax`: of yes among all words; `upstream_generate`: of
    `yes` after the model's own top-k and top-p, nought if another word is likeliest, as ORM and PARM were published.
    One forward pass of a batch, without sampling. In a search it is first asked whether a preview is clear, then, with
    picture and first question kept in memory, whether it is promising.
    """

    question: str = "orm"  # or prm, guidance, or one of your own with {prompt} in it
    mode: AnswerMode = "yes_no_logits"
    sure: float = 0.5  # probability of yes from which a preview is clear, or a clear one promising
    weights: str = ONE_VISION.hub  # or a folder as transformers or LLaVA-NeXT write it, such as ORM's and PARM's
    gradient: bool = False  # to the pixels, from LLaVA-OneVision alone: others prepare pictures outside PyTorch
    batch_size: BatchSize = 8
    about: ClassVar[RewardCard] = RewardCard(
        range="0 to 1", hacked_by="words written into the picture, collages of what the prompt names",
        memory="16 GB (7B)", sources=(ONE_VISION,),
    )  # fmt: skip
    reads: ClassVar[Literal["frames"]] = "frames"
    runs_on: ClassVar[Literal["device"]] = "device"

    def __post_init__(self) -> None:
        if self.question not in QUESTIONS and "{prompt}" not in self.question:
            known = ", ".join(QUESTIONS)
            raise ValueError(f"the question '{self.question:.60}' has no {{prompt}}; expected one, or one of {known}")

    @property
    def differentiable(self) -> bool:
        return self.gradient

    def load(self, placement: Placement) -> VlmScorer:
        name = "" if self.weights == TINY else self.weights
        return VlmScorer(
            self, VlmJudge(load_chat_model(self.weights, placement, gradient=self.gradient), self.mode, self.sure, name)
        )

    def tiny(self) -> Self:
        return replace(self, weights=TINY)


@dataclass(frozen=True)
class VlmScorer:
    """A reward and a verifier."""

    spec: Vlm
    panel: VlmJudge

    def score(self, pixels: Tensor, prompts: Prompts, facts: Sequence[Metadata]) -> Tensor:
        return self.panel.outcome(pixels[:, 0], prompts, self.spec.question).score

    def judge(self, pixels: Tensor, prompts: Prompts, facts: Sequence[Metadata], progress: float) -> Verdict:
        """Of a clip the middle frame is judged."""
        pixels, size = pixels[:, pixels.shape[1] // 2].float(), self.spec.batch_size
        with torch.autocast(pixels.device.type, enabled=False):  # a search runs in the model's precision
            parts = (slice(i, i + size) for i in range(0, len(prompts), size))
            judged = [self.panel.verdict(pixels[p], prompts[p], self.spec.question, progress) for p in parts]
        return concatenate(judged)

    def reasons(self, pixels: Tensor, prompts: Prompts, facts: Sequence[Metadata]) -> list[str]:
        return self.panel.reasons(pixels[:, pixels.shape[1] // 2].float(), prompts, self.spec.batch_size)
