"""Yes or no to a picture of the playground, finished or not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal, Self

import torch
from torch import Tensor

from ..core.reward import BatchSize, RewardCard, Verdict
from ..core.types import Metadata, Placement, Prompts
from ..playground.blocks import first_frame
from ..playground.caption_encoder import requested_captions
from ..playground.judge import YesNoJudge
from ..playground.network_files import TINY, load_network


@dataclass(frozen=True)
class PlaygroundJudge:
    """The probability of 'yes, this shows the caption'; in a search it also says which unfinished ones it can judge."""

    sure: float = 0.5  # probability from which a preview is clear
    promising: float = 0.5  # probability of yes from which a clear one goes on
    weights: str = "playground/judge"
    batch_size: BatchSize = 256
    about: ClassVar[RewardCard] = RewardCard(
        range="0 to 1", hacked_by="pictures unlike those it was shown", memory="3.5 MB"
    )
    differentiable: ClassVar[bool] = True
    reads: ClassVar[Literal["frames"]] = "frames"
    runs_on: ClassVar[Literal["device"]] = "device"

    def load(self, placement: Placement) -> PlaygroundJudgeScorer:
        return PlaygroundJudgeScorer(self, load_network(YesNoJudge, self.weights, placement.device))

    def tiny(self) -> Self:
        return replace(self, weights=TINY)


@dataclass(frozen=True)
class PlaygroundJudgeScorer:
    """A reward and a verifier."""

    spec: PlaygroundJudge
    net: YesNoJudge

    def score(self, pixels: Tensor, prompts: Prompts, facts: Sequence[Metadata]) -> Tensor:
        return self._answers(pixels, prompts, facts)[:, 0]

    @torch.no_grad()
    def judge(self, pixels: Tensor, prompts: Prompts, facts: Sequence[Metadata], progress: float) -> Verdict:
        with torch.autocast(pixels.device.type, enabled=False):  # a search runs in the model's precision
            yes, clear = self._answers(pixels.float(), prompts, facts or [{}] * len(prompts)).unbind(1)
        return Verdict(clear >= self.spec.sure, yes >= self.spec.promising, yes)

    def _answers(self, pixels: Tensor, prompts: Prompts, facts: Sequence[Metadata]) -> Tensor:
        out: Tensor = self.net(first_frame(pixels), requested_captions(prompts, facts, pixels.device))
        return out.sigmoid()
