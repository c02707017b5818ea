"""A differentiable stand-in for the size of a JPEG."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, Self

import torch
from torch import Tensor
from torch.nn import functional

from ..core.reward import BatchSize, RewardCard
from ..core.types import Metadata, Placement, Prompts

# Quantisation steps of coefficients at quality 50 (ITU-T T.81, tables K.1 and K.2).
LUMA = (
    *(16, 11, 10, 16, 24, 40, 51, 61, 12, 12, 14, 19, 26, 58, 60, 55, 14, 13, 16, 24, 40, 57, 69, 56, 14, 17, 22, 29),
    *(51, 87, 80, 62, 18, 22, 37, 56, 68, 109, 103, 77, 24, 35, 55, 64, 81, 104, 113, 92, 49, 64, 78, 87, 103, 121),
    *(120, 101, 72, 92, 95, 98, 112, 100, 103, 99),
)
CHROMA = (
    *(17, 18, 24, 47, 99, 99, 99, 99, 18, 21, 26, 66, 99, 99, 99, 99, 24, 26, 56, 99, 99, 99, 99, 99, 47, 66),
    *(99,) * 38,
)
# RGB to luma and the two chromas (JFIF).
YCC = ((0.299, 0.587, 0.114), (-0.168736, -0.331264, 0.5), (0.5, -0.418688, -0.081312))


@dataclass(frozen=True)
class Compression:
    """Minus the bits, in kilobytes, that a JPEG's coefficients c with quantisation steps q take: 2 log2(1 + (c/q)^2)
    each, summed over the 8x8 cosine transforms of luma and of chroma at half size, the first of a block counted by its
    difference to the block before. Small coefficients, which a JPEG rounds away, cost next to nothing."""

    sign: Literal["compressible", "incompressible"] = "compressible"
    quality: int = 95
    batch_size: BatchSize = 64
    about: ClassVar[RewardCard] = RewardCard(
        range="-7 to -1", hacked_by="plain fields, or noise if it is to be incompressible"
    )
    differentiable: ClassVar[bool] = True
    reads: ClassVar[Literal["frames"]] = "frames"
    runs_on: ClassVar[Literal["device"]] = "device"

    def __post_init__(self) -> None:
        if not 1 <= self.quality <= 100:
            raise ValueError(f"a JPEG's quality is {self.quality}; expected a whole number from 1 to 100")

    def load(self, placement: Placement) -> Self:
        return self

    def tiny(self) -> Self:
        return self

    def score(self, pixels: Tensor, prompts: Prompts, facts: Sequence[Metadata]) -> Tensor:
        planes = torch.einsum("dc,bchw->bdhw", pixels.new_tensor(YCC), pixels[:, 0] * 255)
        halved = functional.avg_pool2d(planes[:, 1:], 2, ceil_mode=True)
        bits = self._bits(planes[:, :1], LUMA) + self._bits(halved, CHROMA)
        return bits / (-8000 if self.sign == "compressible" else 8000)

    def _bits(self, planes: Tensor, table: Sequence[int]) -> Tensor:
        height, width = planes.shape[-2:]
        padded = functional.pad(planes, (0, -width % 8, 0, -height % 8), "replicate")
        blocks = functional.unfold(padded.flatten(0, 1)[:, None], 8, stride=8)  # [B * C, 64, N]
        wave = _cosines().to(planes)
        coefficients = torch.kron(wave, wave) @ blocks  # both ways at once
        first = coefficients[:, :1].diff(dim=2, prepend=coefficients[:, :1, :1])
        scale = 50 / self.quality if self.quality < 50 else 2 - self.quality / 50  # libjpeg's
        steps = (planes.new_tensor(table) * scale).clamp(min=1)[:, None]
        each = (torch.cat([first, coefficients[:, 1:]], 1) / steps).square().log1p() * (2 / math.log(2))
        return each.view(len(planes), -1).sum(1)


def _cosines() -> Tensor:
    """The orthonormal cosine transform of eight points: [8, 8], float64."""
    places = torch.arange(8, dtype=torch.float64)
    wave = torch.cos((2 * places + 1) * places[:, None] * math.pi / 16) / 2
    wave[0] = math.sqrt(1 / 8)
    return wave
