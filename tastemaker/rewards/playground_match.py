"""How well picture and caption of the playground go together, in the shape of CLIP."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal, Self

import torch
from torch import Tensor

from ..core.reward import BatchSize, RewardCard
from ..core.types import Metadata, Placement, Prompts
from ..playground.blocks import first_frame
from ..playground.captions import parse_captions
from ..playground.image_text_scorer import ImageTextScorer, split_quality
from ..playground.network_files import TINY, load_network


@dataclass(frozen=True)
class PlaygroundMatch:
    """The cosine of picture and caption; `crisp. a photo of a dog` adds that of the word, so `relative` can compare."""

    weights: str = "playground/scorer"
    batch_size: BatchSize = 256
    about: ClassVar[RewardCard] = RewardCard(
        range="-1 to 1", hacked_by="textures; the verdict sees what it misses", memory="3.5 MB"
    )
    differentiable: ClassVar[bool] = True
    reads: ClassVar[Literal["frames"]] = "frames"
    runs_on: ClassVar[Literal["device"]] = "device"

    def load(self, placement: Placement) -> PlaygroundMatchScorer:
        return PlaygroundMatchScorer(load_network(ImageTextScorer, self.weights, placement.device))

    def tiny(self) -> Self:
        return replace(self, weights=TINY)


@dataclass(frozen=True)
class PlaygroundMatchScorer:
    net: ImageTextScorer

    def score(self, pixels: Tensor, prompts: Prompts, facts: Sequence[Metadata]) -> Tensor:
        texts, quality = split_quality(prompts)
        captions = parse_captions(texts).to(pixels.device)
        out: Tensor = self.net(first_frame(pixels), captions, torch.tensor(quality, device=pixels.device))
        return out
