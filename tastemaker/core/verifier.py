"""What a reward can be besides a scorer: a verifier of unfinished samples, and a tower that embeds images and texts."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from .types import Metadata, Prompts


@dataclass(frozen=True)
class TowerFeatures:
    """What a frozen image-text network knows about samples and their prompts."""

    image: Tensor  # [B, C] unit embeddings of the images
    text: Tensor  # [B, C] unit embeddings of the prompts
    maps: tuple[Tensor, ...]  # [B, C, h, w] each: features before pooling, which know sizes, colors and places


class ImageTextTower(ABC):
    """A frozen network that embeds images and texts."""

    @abstractmethod
    def encode(self, pixels: Tensor, prompts: Prompts) -> TowerFeatures:
        """Features of the first frame of each sample, with a gradient with respect to the pixels."""

    @abstractmethod
    def image_layers(self) -> tuple[nn.Module, tuple[str, ...]]:
        """The network, and the names of its layers that encode images; LoRA adapters can be added to these."""


@dataclass(frozen=True)
class Verdict:
    """A verifier's judgment of previews."""

    judgeable: Tensor  # [B] bool, whether the preview is clear enough to judge
    promising: Tensor  # [B] bool
    score: Tensor  # [B]


class Verifier(ABC):
    """Judges unfinished samples during search, or declines to judge them yet."""

    @abstractmethod
    def judge(self, pixels: Tensor, prompts: Prompts, metadata: Sequence[Metadata], progress: float) -> Verdict:
        """Judge previews of samples at `progress` from 0 to 1."""

    def explain(self, pixels: Tensor, prompts: Prompts, metadata: Sequence[Metadata]) -> Sequence[str]:
        """What is wrong with each sample, in words for the next attempt; empty strings if it cannot say."""
        return [""] * len(prompts)
