"""How well a picture of the playground is made, whatever it shows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal, Self

from torch import Tensor

from ..core.reward import BatchSize, RewardCard
from ..core.types import Metadata, Placement, Prompts
from ..playground.blocks import first_frame
from ..playground.network_files import TINY, load_network
from ..playground.taste import QualityScorer


@dataclass(frozen=True)
class PlaygroundTaste:
    """A taste for crisp and sound pictures over noisy, blurry and broken ones."""

    weights: str = "playground/taste"
    batch_size: BatchSize = 256
    about: ClassVar[RewardCard] = RewardCard(
        range="-8 to 8", hacked_by="crisp pictures of something else", memory="0.5 MB"
    )
    differentiable: ClassVar[bool] = True
    reads: ClassVar[Literal["frames"]] = "frames"
    runs_on: ClassVar[Literal["device"]] = "device"

    def load(self, placement: Placement) -> PlaygroundTasteScorer:
        return PlaygroundTasteScorer(load_network(QualityScorer, self.weights, placement.device))

    def tiny(self) -> Self:
        return replace(self, weights=TINY)


@dataclass(frozen=True)
class PlaygroundTasteScorer:
    net: QualityScorer

    def score(self, pixels: Tensor, prompts: Prompts, facts: Sequence[Metadata]) -> Tensor:
        out: Tensor = self.net(first_frame(pixels))
        return out
