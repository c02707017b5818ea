"""How much moves in a clip, without any weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field
from torch import Tensor

from ..reward import About, Rows
from ..types import Facts, Placement, Prompts
from .nets.flow import WORKING, flow, working

SMOOTH = 1e-6  # keeps the slope of a length finite where nothing moves


@dataclass(frozen=True)
class Dynamics:
    """The mean way from frame to frame, in hundredths of the shorter side, by optical flow (Lucas and Kanade).

    A cheap stand-in for the dynamic degree of VBench, which asks RAFT and takes the fastest twentieth of the places
    (`share: 0.05` here); steps above a tenth of the side are lost from sight.
    """

    share: Annotated[float, Field(gt=0, le=1)] = 1.0  # of the places, the fastest
    batch_size: Rows = 16
    about: ClassVar[About] = About(
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

    def score(self, pixels: Tensor, prompts: Prompts, facts: Sequence[Facts]) -> Tensor:
        rows, frames = pixels.shape[:2]
        if frames < 2:
            raise ValueError("dynamics compares frames, but the clips have one; expected two or more")
        small = working(pixels.flatten(0, 1))
        small = small.view(rows, frames, *small.shape[1:])
        moved = flow(small[:, :-1].flatten(0, 1), small[:, 1:].flatten(0, 1))  # [B * (F - 1), 2, h, w]
        length = (moved.square().sum(1) + SMOOTH).sqrt() - SMOOTH**0.5
        fastest = length.flatten(1).topk(max(1, round(self.share * length[0].numel()))).values
        step: Tensor = fastest.mean(1).view(rows, -1).mean(1)
        return step * (100 / WORKING)
