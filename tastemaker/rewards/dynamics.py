"""How much moves in a clip, without any weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field
from torch import Tensor

from ..core.reward import BatchSize, RewardCard
from ..core.types import Metadata, Placement, Prompts
from .backbones.optical_flow import motion_magnitude


@dataclass(frozen=True)
class DynamicsReward:
    """The mean way from frame to frame, in hundredths of the shorter side, by optical flow (Lucas and Kanade).

    A cheap stand-in for the dynamic degree of VBench, which asks RAFT and takes the fastest twentieth of the places
    (`share: 0.05` here); steps above a tenth of the side are lost from sight.
    """

    share: Annotated[float, Field(gt=0, le=1)] = 1.0  # of the places, the fastest
    batch_size: BatchSize = 16
    about: ClassVar[RewardCard] = RewardCard(
        range="0 for a frozen clip, 1 to 5 for a lively one, to about 10",
        hacked_by="camera shake, drifting or boiling textures; motion of any kind, asked for or not",
    )
    differentiable: ClassVar[bool] = True
    reads: ClassVar[Literal["clip"]] = "clip"
    runs_on: ClassVar[Literal["device"]] = "device"

    def load(self, placement: Placement) -> Self:
        return self

    def tiny(self) -> Self:
        return self

    def score(self, pixels: Tensor, prompts: Prompts, facts: Sequence[Metadata]) -> Tensor:
        if pixels.shape[1] < 2:
            raise ValueError("dynamics compares frames, but the clips have one; expected two or more")
        return motion_magnitude(pixels, self.share)
