"""Motion in videos, without network weights: stillness, dynamics and flicker."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar

from pydantic import Field
from torch import Tensor

from ..core.reward import BatchSize, Modality, RewardCard, WeightlessReward
from ..core.types import Metadata, Prompts
from .backbones.optical_flow import flicker_score, motion_magnitude


@dataclass(frozen=True)
class StillnessReward(WeightlessReward):
    """One minus the mean absolute change of a pixel from frame to frame."""

    batch_size: BatchSize = 64
    card: ClassVar[RewardCard] = RewardCard(range="0 to 1", failure_modes="frozen videos")
    differentiable: ClassVar[bool] = True
    modality: ClassVar[Modality] = "video"

    def score(self, pixels: Tensor, prompts: Prompts, metadata: Sequence[Metadata]) -> Tensor:
        require_frames("stillness", pixels, 2)
        return 1 - pixels.diff(dim=1).abs().mean((1, 2, 3, 4))


@dataclass(frozen=True)
class DynamicsReward(WeightlessReward):
    """The mean motion from frame to frame in percent of the shorter side, by optical flow (Lucas and Kanade, 1981).

    A cheap substitute for VBench's dynamic degree, which uses RAFT and averages the fastest 5 % of the pixels
    (`top_fraction: 0.05` here). Motion of more than a tenth of the side per frame is not tracked.
    """

    top_fraction: Annotated[float, Field(gt=0, le=1)] = 1.0  # of the pixels, the fastest
    batch_size: BatchSize = 16
    card: ClassVar[RewardCard] = RewardCard(
        range="0 for a frozen video, 1 to 5 for a lively one, up to about 10",
        failure_modes="camera shake, drifting or boiling textures; motion that was not requested",
    )
    differentiable: ClassVar[bool] = True
    modality: ClassVar[Modality] = "video"

    def score(self, pixels: Tensor, prompts: Prompts, metadata: Sequence[Metadata]) -> Tensor:
        require_frames("dynamics", pixels, 2)
        return motion_magnitude(pixels, self.top_fraction)


@dataclass(frozen=True)
class FlickerReward(WeightlessReward):
    """Minus half the mean difference of a pixel to the mean of its motion-compensated neighbors in time.

    Even motion and even fading cost nothing; alternating brightness costs its amplitude. Frames are compared at 64
    pixels a side, so finer grain is averaged away.
    """

    batch_size: BatchSize = 16
    card: ClassVar[RewardCard] = RewardCard(
        range="-0.5 to 0, above -0.02 for a steady video, moving or not", failure_modes="frozen or blurred videos"
    )
    differentiable: ClassVar[bool] = True
    modality: ClassVar[Modality] = "video"

    def score(self, pixels: Tensor, prompts: Prompts, metadata: Sequence[Metadata]) -> Tensor:
        require_frames("flicker", pixels, 3)
        return -flicker_score(pixels)


def require_frames(reward: str, pixels: Tensor, count: int) -> None:
    if pixels.shape[1] < count:
        raise ValueError(
            f"{reward} compares frames; expected videos of {count} frames or more, got {pixels.shape[1]}; use "
            "longer videos [TM398]"
        )
