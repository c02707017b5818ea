"""Yes-or-no questions to a vision-language model, as reward, as verifier (ORM and PARM) and as pairwise judge."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ..core.reward import BatchSize, PairwiseReward, PretrainedReward, Reward, RewardCard, Verdict, Verifier
from ..core.types import Metadata, Placement, Prompts, concatenate
from ..vlm.chat_model import ONE_VISION, load_chat_model
from ..vlm.judge import VlmJudge
from ..vlm.yes_no import QUESTIONS, AnswerMode
from .backbones.frozen_models import TINY

PAIR_QUESTION = (
    'Two images stand side by side. Does the left one show "{prompt}" better than the right one? Answer yes or no.'
)
GAP = 0.05  # of the width, between two images side by side


@dataclass(frozen=True)
class VlmReward(PretrainedReward):
    """The probability of `yes` to a question about the image, by LLaVA-OneVision, Qwen-VL, PaliGemma or another family.

    `answer_mode` is `yes_no_logits` (yes against no, in any spelling), `full_softmax` (yes among all tokens) or
    `upstream_generate` (yes after the model's own top-k and top-p, zero if another token is more likely, as in the
    published ORM and PARM). A score is one forward pass, without sampling. In a search the model is first asked whether
    a preview is clear, and then, with the same KV cache, whether it is promising.
    """

    question: str = "orm"  # or prm, guidance, or your own text with {prompt} in it
    answer_mode: AnswerMode = "yes_no_logits"
    threshold: float = 0.5  # probability of yes from which a preview counts as clear or promising
    weights: str = ONE_VISION.hub  # or a folder in the layout of transformers or LLaVA-NeXT, such as ORM and PARM
    pixel_gradient: bool = False  # LLaVA-OneVision only: others prepare images outside PyTorch
    batch_size: BatchSize = 8
    card: ClassVar[RewardCard] = RewardCard(
        range="0 to 1", failure_modes="words written into the image, collages of the prompt's objects",
        memory="16 GB (7B)", sources=(ONE_VISION,),
    )  # fmt: skip

    def __post_init__(self) -> None:
        if self.question not in QUESTIONS and "{prompt}" not in self.question:
            known = ", ".join(QUESTIONS)
            raise ValueError(
                f"'question': '{self.question:.60}' does not contain {{prompt}}; add {{prompt}}, or use one of "
                f"{known} [TM410]"
            )

    @property
    def differentiable(self) -> bool:
        return self.pixel_gradient

    def load(self, placement: Placement) -> VlmScorer:
        model = load_chat_model(self.weights, placement, differentiable=self.pixel_gradient)
        name = "" if self.weights == TINY else self.weights
        return VlmScorer(self, VlmJudge(model, self.answer_mode, self.threshold, name))


@dataclass(frozen=True)
class VlmScorer(Reward, Verifier):
    spec: VlmReward
    vlm_judge: VlmJudge

    def verifier(self) -> Verifier:
        return self

    def score(self, pixels: Tensor, prompts: Prompts, metadata: Sequence[Metadata]) -> Tensor:
        return self.vlm_judge.judge_finished(pixels[:, 0], prompts, self.spec.question).score

    def judge(self, pixels: Tensor, prompts: Prompts, metadata: Sequence[Metadata], progress: float) -> Verdict:
        """Judge images, and videos by their middle frame."""
        pixels, size = pixels[:, pixels.shape[1] // 2].float(), self.spec.batch_size
        with torch.autocast(pixels.device.type, enabled=False):  # a search runs in the model's precision
            chunks = (slice(i, i + size) for i in range(0, len(prompts), size))
            verdicts = [
                self.vlm_judge.judge(pixels[chunk], prompts[chunk], self.spec.question, progress) for chunk in chunks
            ]
        return concatenate(verdicts)

    def explain(self, pixels: Tensor, prompts: Prompts, metadata: Sequence[Metadata]) -> list[str]:
        return self.vlm_judge.explain(pixels[:, pixels.shape[1] // 2].float(), prompts, self.spec.batch_size)


@dataclass(frozen=True)
class VlmPairReward(PretrainedReward):
    """A pairwise judge for `win_rate`: a vision-language model sees two images side by side; is the left one better?

    The answer is the probability of `yes`. Published pairwise judges are asked in other words; give theirs as
    `question`. The models prefer one side, so keep `order: both` of `win_rate`.
    """

    question: str = PAIR_QUESTION
    answer_mode: AnswerMode = "yes_no_logits"
    weights: str = ONE_VISION.hub  # or a folder in the layout of transformers or LLaVA-NeXT
    batch_size: BatchSize = 8  # pairs
    card: ClassVar[RewardCard] = RewardCard(
        range="0 to 1", failure_modes="words written into the image, collages; a preference for one side",
        memory="16 GB (7B)", sources=(ONE_VISION,),
    )  # fmt: skip

    def __post_init__(self) -> None:
        if "{prompt}" not in self.question:
            raise ValueError(f"'question': '{self.question:.60}' does not contain {{prompt}}; add {{prompt}} [TM1588]")

    @property
    def compares_pairs(self) -> bool:
        return True

    def load(self, placement: Placement) -> VlmPairJudge:
        name = "" if self.weights == TINY else self.weights
        return VlmPairJudge(self, VlmJudge(load_chat_model(self.weights, placement), self.answer_mode, 0.5, name))


@dataclass(frozen=True)
class VlmPairJudge(PairwiseReward):
    spec: VlmPairReward
    vlm_judge: VlmJudge

    def compare(self, first: Tensor, second: Tensor, prompts: Prompts, metadata: Sequence[Metadata]) -> Tensor:
        """Compare images, and videos by their middle frame."""
        left, right = (pixels[:, pixels.shape[1] // 2] for pixels in (first, second))
        gap = left.new_ones(*left.shape[:3], max(1, round(GAP * left.shape[3])))
        return self.vlm_judge.judge_finished(torch.cat([left, gap, right], 3), prompts, self.spec.question).score
