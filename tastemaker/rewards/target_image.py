"""Likeness to a picture that comes with the prompt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import ClassVar, Literal, Self

import torch
from torch import Tensor

from ..core.reward import BatchSize, RewardCard
from ..core.types import Metadata, Placement, Prompts
from ..data.image_io import read_image


@dataclass(frozen=True)
class Mse:
    """Minus the mean squared difference to the picture in the fact `target`."""

    batch_size: BatchSize = 64
    about: ClassVar[RewardCard] = RewardCard(range="-1 to 0", hacked_by="nothing but the target itself")
    differentiable: ClassVar[bool] = True
    reads: ClassVar[Literal["frames"]] = "frames"
    runs_on: ClassVar[Literal["device"]] = "device"

    def load(self, placement: Placement) -> Self:
        return self

    def tiny(self) -> Self:
        return self

    def score(self, pixels: Tensor, prompts: Prompts, facts: Sequence[Metadata]) -> Tensor:
        return -(pixels[:, 0] - target_images(pixels, prompts, facts)).square().mean((1, 2, 3))


@dataclass(frozen=True)
class L1:
    """Minus the mean absolute difference to the picture in the fact `target`."""

    batch_size: BatchSize = 64
    about: ClassVar[RewardCard] = RewardCard(range="-1 to 0", hacked_by="nothing but the target itself")
    differentiable: ClassVar[bool] = True
    reads: ClassVar[Literal["frames"]] = "frames"
    runs_on: ClassVar[Literal["device"]] = "device"

    def load(self, placement: Placement) -> Self:
        return self

    def tiny(self) -> Self:
        return self

    def score(self, pixels: Tensor, prompts: Prompts, facts: Sequence[Metadata]) -> Tensor:
        return -(pixels[:, 0] - target_images(pixels, prompts, facts)).abs().mean((1, 2, 3))


def target_images(pixels: Tensor, prompts: Prompts, facts: Sequence[Metadata]) -> Tensor:
    """The picture each row is to look like, of a clip the frame that the row is: [B, 3, H, W]."""
    return torch.stack([_target(pixels, *row) for row in zip(prompts, facts, strict=True)]).to(pixels)


def _target(pixels: Tensor, prompt: str, fact: Metadata) -> Tensor:
    target = fact.get("target")
    if isinstance(target, (str, Path)):
        target = _read(Path(target))
    if not isinstance(target, Tensor):
        raise ValueError(f"the prompt '{prompt}' has no fact 'target'; give a path or pixels [F, 3, H, W]")
    frame = fact.get("frame", 0) if len(target) > 1 else 0  # a still is the target of every frame
    if target.shape[1:] != pixels.shape[2:] or frame >= len(target):
        found, wanted = list(target.shape), list(pixels.shape[2:])
        raise ValueError(f"the target of '{prompt}' is {found}; expected [F, 3, H, W] with {wanted} and frame {frame}")
    picture: Tensor = target[frame]
    return picture


@lru_cache(maxsize=64)
def _read(path: Path) -> Tensor:
    return read_image(path)
