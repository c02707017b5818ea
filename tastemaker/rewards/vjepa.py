"""How well a clip can be foreseen by a network that learnt to fill in hidden parts of real ones (VADER, section 4)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal, Self

from torch import Tensor

from ..core.reward import BatchSize, RewardCard
from ..core.types import Metadata, Placement, Prompts
from .backbones.loading import TINY
from .backbones.vjepa import VJEPA, VjepaPredictor, load_vjepa


@dataclass(frozen=True)
class Vjepa:
    """Minus the loss V-JEPA 2 was trained by: the mean absolute error of the features of hidden parts of the clip.

    What is hidden is drawn as in its training, eight small blocks or two large ones through all frames, but once and
    for all by `seed`, so that a clip has one score. Frames are enlarged by 8/7 and cropped to 256 pixels, an odd last
    frame is left out; gradients flow through what is seen and through what is to be foreseen.
    """

    masks: BatchSize = 1  # draws, each of small and of large blocks
    seed: int = 0
    weights: str = VJEPA.hub
    batch_size: BatchSize = 2
    about: ClassVar[RewardCard] = RewardCard(
        range="about -1 to 0, on a scale of its own for each size of the network; compare clips, not numbers",
        hacked_by="frozen, blurred or empty clips, which are foreseen without fail: watch `dynamics` beside it",
        memory="1.5 GB",
        sources=(VJEPA,),
    )
    differentiable: ClassVar[bool] = True
    reads: ClassVar[Literal["clip"]] = "clip"
    runs_on: ClassVar[Literal["device"]] = "device"

    def load(self, placement: Placement) -> VjepaScorer:
        return VjepaScorer(load_vjepa(self.weights, self.masks, self.seed, placement))

    def tiny(self) -> Self:
        return replace(self, weights=TINY)


@dataclass(frozen=True)
class VjepaScorer:
    net: VjepaPredictor

    def score(self, pixels: Tensor, prompts: Prompts, facts: Sequence[Metadata]) -> Tensor:
        return -self.net.surprise(pixels)
