"""How much a clip flickers, without any weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, Self

from torch import Tensor

from ..reward import About, Rows
from ..types import Facts, Placement, Prompts
from .nets.flow import flow, warped, working


@dataclass(frozen=True)
class Flicker:
    """Minus half the mean difference of a pixel to the mean of its two neighbours in time, motion followed.

    What moves or fades evenly costs nothing, what is bright and dark in turn costs its amplitude. Frames are compared
    at 64 pixels a side, so grain finer than that is averaged away.
    """

    batch_size: Rows = 16
    about: ClassVar[About] = About(
        range="-0.5 to 0, above -0.02 for a steady clip that moves or not", hacked_by="frozen or blurred clips"
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
        if frames < 3:
            raise ValueError(f"flicker needs three frames or more, but the clips have {frames}")
        small = working(pixels.flatten(0, 1))
        small = small.view(rows, frames, *small.shape[1:])
        before, now, after = (small[:, k : frames - 2 + k].flatten(0, 1) for k in range(3))
        around = (warped(before, flow(now, before)) + warped(after, flow(now, after))) / 2
        return (now - around).abs().mean((1, 2, 3)).view(rows, -1).mean(1) / -2
