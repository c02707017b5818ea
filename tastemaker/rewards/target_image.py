"""Similarity to an image or video that comes with the prompt: mean squared error, L1 and LPIPS."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor

from ..autoencoders.lpips import VGG16, LPIPSDistance, load_lpips
from ..core.reward import BatchSize, PretrainedReward, Reward, RewardCard, WeightlessReward
from ..core.types import Metadata, Placement, Prompts
from ..data.image_io import read_image


@dataclass(frozen=True)
class MseReward(WeightlessReward):
    """Minus the mean squared difference to the image in the metadata field `target`."""

    batch_size: BatchSize = 64
    card: ClassVar[RewardCard] = RewardCard(range="-1 to 0", failure_modes="none: the target itself has the best score")
    differentiable: ClassVar[bool] = True

    def score(self, pixels: Tensor, prompts: Prompts, metadata: Sequence[Metadata]) -> Tensor:
        return -(pixels[:, 0] - target_images(pixels, prompts, metadata)).square().mean((1, 2, 3))


@dataclass(frozen=True)
class L1Reward(WeightlessReward):
    """Minus the mean absolute difference to the image in the metadata field `target`."""

    batch_size: BatchSize = 64
    card: ClassVar[RewardCard] = RewardCard(range="-1 to 0", failure_modes="none: the target itself has the best score")
    differentiable: ClassVar[bool] = True

    def score(self, pixels: Tensor, prompts: Prompts, metadata: Sequence[Metadata]) -> Tensor:
        return -(pixels[:, 0] - target_images(pixels, prompts, metadata)).abs().mean((1, 2, 3))


@dataclass(frozen=True)
class LpipsReward(PretrainedReward):
    """Minus the perceptual distance (Zhang et al. 2018, VGG16) to the image in the metadata field `target`."""

    weights: str = VGG16.hub  # VGG16 of torchvision or timm, or a complete LPIPS
    head: str = ""  # path of the LPIPS 0.1 heads; those of the installed package lpips if empty
    batch_size: BatchSize = 32
    card: ClassVar[RewardCard] = RewardCard(
        range="-0.8 to 0",
        failure_modes="none: the target itself has the best score; fine grain may differ from the target",
        memory="59 MB",
        sources=(VGG16,),
    )
    differentiable: ClassVar[bool] = True

    def load(self, placement: Placement) -> LpipsScorer:
        return LpipsScorer(load_lpips(self.weights, self.head, placement))


@dataclass(frozen=True)
class LpipsScorer(Reward):
    net: LPIPSDistance

    def score(self, pixels: Tensor, prompts: Prompts, metadata: Sequence[Metadata]) -> Tensor:
        targets = target_images(pixels, prompts, metadata)
        distance: Tensor = self.net(pixels[:, 0].to(self.net.scale.dtype), targets.to(self.net.scale.dtype))
        return -distance.to(pixels.dtype)


def target_images(pixels: Tensor, prompts: Prompts, metadata: Sequence[Metadata]) -> Tensor:
    """The target of each sample: [B, 3, H, W]. Of a video target it is the frame that the sample is."""
    return torch.stack([_target(pixels, *pair) for pair in zip(prompts, metadata, strict=True)]).to(pixels)


def _target(pixels: Tensor, prompt: str, metadata: Metadata) -> Tensor:
    target = metadata.get("target")
    if isinstance(target, (str, Path)):
        target = _read(Path(target))
    if not isinstance(target, Tensor):
        raise ValueError(
            f"the prompt '{prompt:.80}' does not have 'target' in its metadata; add a path or pixels "
            "[F, 3, H, W] [TM407]"
        )
    frame = metadata.get("frame", 0) if len(target) > 1 else 0  # an image is the target of every frame
    if target.shape[1:] != pixels.shape[2:] or frame >= len(target):
        expected = f"[F, 3, H, W] with {list(pixels.shape[2:])} and frame {frame}"
        raise ValueError(
            f"the target of '{prompt:.80}' has the shape {list(target.shape)}; expected {expected}, so resize the "
            "target [TM408]"
        )
    image: Tensor = target[frame]
    return image


@lru_cache(maxsize=64)
def _read(path: Path) -> Tensor:
    return read_image(path)
