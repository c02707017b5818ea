"""How well a picture of the playground is made, whatever it shows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal, Self

from torch import Tensor

from ..playground.blocks import still
from ..playground.taste import Taste
from ..playground.trained import TINY, load
from ..reward import About, Rows
from ..types import Facts, Placement, Prompts


@dataclass(frozen=True)
class PlaygroundTaste:
    """A taste for crisp and sound pictures over noisy, blurry and broken ones."""

    weights: str = "playground/taste"
    batch_size: Rows = 256
    about: ClassVar[About] = About(range="-8 to 8", hacked_by="crisp pictures of something else", memory="0.5 MB")
    differentiable: ClassVar[bool] = True
    reads: ClassVar[Literal["frames"]] = "frames"
    runs_on: ClassVar[Literal["device"]] = "device"

    def load(self, placement: Placement) -> TasteScorer:
        return TasteScorer(load(Taste, self.weights, placement.device))

    def tiny(self) -> Self:
        return replace(self, weights=TINY)


@dataclass(frozen=True)
class TasteScorer:
    net: Taste

    def score(self, pixels: Tensor, prompts: Prompts, facts: Sequence[Facts]) -> Tensor:
        out: Tensor = self.net(still(pixels))
        return out
