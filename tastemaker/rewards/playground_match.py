"""How well picture and caption of the playground go together, in the shape of CLIP."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal, Self

import torch
from torch import Tensor

from ..playground.blocks import still
from ..playground.captions import parse
from ..playground.scorer import Scorer, split_quality
from ..playground.trained import TINY, load
from ..reward import About, Rows
from ..types import Facts, Placement, Prompts


@dataclass(frozen=True)
class PlaygroundMatch:
    """The cosine of picture and caption; `crisp. a photo of a dog` adds that of the word, so `relative` can compare."""

    weights: str = "playground/scorer"
    batch_size: Rows = 256
    about: ClassVar[About] = About(
        range="-1 to 1", hacked_by="textures; the verdict sees what it misses", memory="3.5 MB"
    )
    differentiable: ClassVar[bool] = True
    reads: ClassVar[Literal["frames"]] = "frames"
    runs_on: ClassVar[Literal["device"]] = "device"

    def load(self, placement: Placement) -> MatchScorer:
        return MatchScorer(load(Scorer, self.weights, placement.device))

    def tiny(self) -> Self:
        return replace(self, weights=TINY)


@dataclass(frozen=True)
class MatchScorer:
    net: Scorer

    def score(self, pixels: Tensor, prompts: Prompts, facts: Sequence[Facts]) -> Tensor:
        texts, quality = split_quality(prompts)
        captions = parse(texts).to(pixels.device)
        out: Tensor = self.net(still(pixels), captions, torch.tensor(quality, device=pixels.device))
        return out
