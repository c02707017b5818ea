"""Whether a clip shows the action it was to show, by a classifier of actions (VADER, Prabhudesai et al. 2024)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal, Self

import torch
from torch import Tensor

from ..core.reward import BatchSize, RewardCard
from ..core.types import Metadata, Placement, Prompts
from .backbones.loading import TINY
from .backbones.videomae import VIDEOMAE, ActionClassifier, load_action_classifier


@dataclass(frozen=True)
class Actpred:
    """The probability VideoMAE gives to the action of the prompt, of the 400 of Kinetics, or its logarithm.

    The action is `label`, the prompt's fact `action`, the prompt itself if it is one of Kinetics', or what one of
    VADER's thirteen words in it means. Frames are stretched to 224 pixels a side; an odd last frame is left out.
    """

    label: str | None = None  # of every clip, whatever its prompt
    logarithm: bool = True  # VADER's loss; its curves show the probability itself
    every: BatchSize = 1  # of so many frames the first is looked at; 2 is VADER's `alt`
    weights: str = VIDEOMAE.hub
    batch_size: BatchSize = 4
    about: ClassVar[RewardCard] = RewardCard(
        range="-6 (chance) to 0; as a probability 0 to 1",
        hacked_by="the thing the action is done with, held in view; textures the classifier likes",
        memory="0.35 GB",
        sources=(VIDEOMAE,),
    )
    differentiable: ClassVar[bool] = True
    reads: ClassVar[Literal["clip"]] = "clip"
    runs_on: ClassVar[Literal["device"]] = "device"

    def load(self, placement: Placement) -> ActpredScorer:
        return ActpredScorer(self, load_action_classifier(self.weights, placement))

    def tiny(self) -> Self:
        return replace(self, weights=TINY, label=self.label or "playing piano")


@dataclass(frozen=True)
class ActpredScorer:
    spec: Actpred
    net: ActionClassifier

    def score(self, pixels: Tensor, prompts: Prompts, facts: Sequence[Metadata]) -> Tensor:
        told = [fact.get("action") for fact in facts] or [None] * len(prompts)
        places = [self.net.place(p, self.spec.label or fact) for p, fact in zip(prompts, told, strict=True)]
        likely = self.net.likely(pixels[:, :: self.spec.every])  # [B, actions]
        found = likely.gather(1, torch.tensor(places, device=likely.device)[:, None])[:, 0]
        return found if self.spec.logarithm else found.exp()
