"""Similarity of an edit to its source, outside of the region that the edit may change."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar, Literal, Self

import torch
from torch import Tensor

from ..autoencoders.lpips import VGG16, LPIPSDistance, load_lpips
from ..core.cards import WeightsSource, parse_hub_id
from ..core.reward import BatchSize, Reward, RewardCard, RewardSpec
from ..core.types import Metadata, Placement, Prompts
from ..data.image_io import resize_and_center_crop
from .backbones.frozen_models import TINY
from .image_similarity import DINO, Embed, load_dino
from .reference_images import reference_images

MIN_OUTSIDE = 1e-3  # share of an image outside of its mask, below which it counts as this share


@dataclass(frozen=True)
class SourceSimilarityReward(RewardSpec):
    """Similarity to the source image outside of the mask; to the whole source for prompts without a mask.

    Inside of the mask the sample counts as equal to the source. Of several sources it is the first one. `l1` is 1 minus
    the mean absolute difference, `lpips` 1 minus the perceptual distance, both per area outside of the mask, and `dino`
    the cosine of DINO's features.
    """

    metric: Literal["l1", "lpips", "dino"] = "l1"
    source: str = "image"  # key of the metadata that holds the source, a path or pixels
    mask: str = "mask"  # key of the metadata that holds the mask, white where the edit may change the image
    weights: str = ""  # of VGG16 for `lpips`, of a DINO for `dino`; by default the published ones
    head: str = ""  # of `lpips`: path of the LPIPS 0.1 heads; those of the installed package lpips if empty
    batch_size: BatchSize = 32
    card: ClassVar[RewardCard] = RewardCard(
        range="0 to 1",
        failure_modes="copies of the source: always add a reward of the instruction; without a mask, small edits only",
        memory="none; `lpips` 59 MB, `dino` 0.35 GB",
    )
    differentiable: ClassVar[bool] = True

    @property
    def sources(self) -> tuple[WeightsSource, ...]:
        """Published weights of the metric, or those that `weights` names."""
        published = {"l1": (), "lpips": (VGG16,), "dino": (DINO,)}[self.metric]
        if not published or not self.weights or self.weights == published[0].hub:
            return published
        return () if Path(self.weights).expanduser().exists() else (parse_hub_id(self.weights),)

    def load(self, placement: Placement) -> SourceSimilarityScorer:
        lpips = load_lpips(self.weights or VGG16.hub, self.head, placement) if self.metric == "lpips" else None
        embed = load_dino(self.weights or DINO.hub, placement) if self.metric == "dino" else None
        return SourceSimilarityScorer(self, lpips, embed)

    def tiny(self) -> Self:
        return replace(self, weights=TINY)


@dataclass(frozen=True)
class SourceSimilarityScorer(Reward):
    spec: SourceSimilarityReward
    lpips: LPIPSDistance | None
    embed: Embed | None

    def score(self, pixels: Tensor, prompts: Prompts, metadata: Sequence[Metadata]) -> Tensor:
        frame = pixels[:, 0]
        sources = first_images(self.spec.source, frame, prompts, metadata)
        allowed = read_masks(self.spec.mask, frame, prompts, metadata)
        sample = torch.lerp(frame, sources, allowed)  # equal to the source where the edit may change it
        outside = (1 - allowed).mean((1, 2, 3)).clamp(min=MIN_OUTSIDE)
        if self.lpips is not None:
            dtype = self.lpips.scale.dtype
            distance: Tensor = self.lpips(sample.to(dtype), sources.to(dtype))
            return 1 - distance.to(pixels.dtype) / outside
        if self.embed is not None:
            with torch.no_grad():
                features = self.embed(sources)
            return (self.embed(sample) * features).sum(1).to(pixels.dtype)
        return 1 - (sample - sources).abs().mean((1, 2, 3)) / outside


def first_images(key: str, like: Tensor, prompts: Prompts, metadata: Sequence[Metadata]) -> Tensor:
    """The first image under a key of each sample's metadata, at the size of the samples [B, 3, H, W]."""
    images = [images[0][None] for images in reference_images(key, prompts, metadata)]
    return torch.cat([resize_and_center_crop(image.to(like), *like.shape[2:]) for image in images])


def read_masks(key: str, like: Tensor, prompts: Prompts, metadata: Sequence[Metadata]) -> Tensor:
    """1 where an edit may change the image, [B, 1, H, W]; 0 everywhere for samples without a mask."""
    masks = like.new_zeros(len(like), 1, *like.shape[2:])
    rows = [row for row, entry in enumerate(metadata) if entry.get(key) is not None]
    if rows:
        images = first_images(key, like, [prompts[row] for row in rows], [metadata[row] for row in rows])
        masks[rows] = images.mean(1, keepdim=True)
    return masks
