"""Size of an image's JPEG (DDPO, Black et al. 2023), counted or by a differentiable approximation."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from io import BytesIO
from typing import ClassVar, Literal

import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional

from ..core.reward import BatchSize, RewardCard, WeightlessReward
from ..core.types import Metadata, Prompts
from ..data.image_io import to_uint8

# Quantization steps of coefficients at quality 50 (ITU-T T.81, tables K.1 and K.2).
LUMA = (
    *(16, 11, 10, 16, 24, 40, 51, 61, 12, 12, 14, 19, 26, 58, 60, 55, 14, 13, 16, 24, 40, 57, 69, 56, 14, 17, 22, 29),
    *(51, 87, 80, 62, 18, 22, 37, 56, 68, 109, 103, 77, 24, 35, 55, 64, 81, 104, 113, 92, 49, 64, 78, 87, 103, 121),
    *(120, 101, 72, 92, 95, 98, 112, 100, 103, 99),
)
CHROMA = (
    *(17, 18, 24, 47, 99, 99, 99, 99, 18, 21, 26, 66, 99, 99, 99, 99, 24, 26, 56, 99, 99, 99, 99, 99, 47, 66),
    *(99,) * 38,
)
RGB_TO_YCBCR = ((0.299, 0.587, 0.114), (-0.168736, -0.331264, 0.5), (0.5, -0.418688, -0.081312))  # JFIF
CompressionGoal = Literal["compressible", "incompressible"]


@dataclass(frozen=True)
class JpegReward(WeightlessReward):
    """Minus the kilobytes of each image's JPEG if the goal is compressible, plus if incompressible."""

    goal: CompressionGoal = "compressible"
    quality: int = 95
    batch_size: BatchSize = 64
    card: ClassVar[RewardCard] = RewardCard(
        range="-300 to 300 kilobytes", failure_modes="plain fields for compressible, noise for incompressible"
    )
    runs_on: ClassVar[Literal["host"]] = "host"

    def __post_init__(self) -> None:
        check_quality(self.quality)

    def score(self, pixels: Tensor, prompts: Prompts, metadata: Sequence[Metadata]) -> Tensor:
        sizes = torch.tensor([self._kilobytes(image) for image in pixels[:, 0]])
        return -sizes if self.goal == "compressible" else sizes

    def _kilobytes(self, image: Tensor) -> float:
        file = BytesIO()
        Image.fromarray(to_uint8(image)).save(file, "JPEG", quality=self.quality)
        return file.tell() / 1000


@dataclass(frozen=True)
class CompressionReward(WeightlessReward):
    """Minus the estimated kilobytes of a JPEG: 2 log2(1 + (c/q)^2) bits per coefficient c with quantization step q.

    The sum runs over the 8x8 cosine transforms of luma and of chroma at half size; the first coefficient of a block
    counts by its difference to the block before. Small coefficients, which a JPEG rounds away, cost almost nothing.
    """

    goal: CompressionGoal = "compressible"
    quality: int = 95
    batch_size: BatchSize = 64
    card: ClassVar[RewardCard] = RewardCard(
        range="-7 to -1", failure_modes="plain fields, or noise if the goal is incompressible"
    )
    differentiable: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_quality(self.quality)

    def score(self, pixels: Tensor, prompts: Prompts, metadata: Sequence[Metadata]) -> Tensor:
        planes = torch.einsum("dc,bchw->bdhw", pixels.new_tensor(RGB_TO_YCBCR), pixels[:, 0] * 255)
        chroma = functional.avg_pool2d(planes[:, 1:], 2, ceil_mode=True)
        bits = self._bits(planes[:, :1], LUMA) + self._bits(chroma, CHROMA)
        return bits / (-8000 if self.goal == "compressible" else 8000)

    def _bits(self, planes: Tensor, table: Sequence[int]) -> Tensor:
        """Bits of planes [B, C, h, w] quantized by a table of 64 steps: [B]."""
        height, width = planes.shape[-2:]
        padded = functional.pad(planes, (0, -width % 8, 0, -height % 8), "replicate")
        blocks = functional.unfold(padded.flatten(0, 1)[:, None], 8, stride=8)  # [B * C, 64, N]
        dct = dct_matrix().to(planes)
        coefficients = torch.kron(dct, dct) @ blocks  # rows and columns in one product
        first = coefficients[:, :1].diff(dim=2, prepend=coefficients[:, :1, :1])
        scale = 50 / self.quality if self.quality < 50 else 2 - self.quality / 50  # libjpeg's
        steps = (planes.new_tensor(table) * scale).clamp(min=1)[:, None]
        bits = (torch.cat([first, coefficients[:, 1:]], 1) / steps).square().log1p() * (2 / math.log(2))
        return bits.view(len(planes), -1).sum(1)


def check_quality(quality: int) -> None:
    if not 1 <= quality <= 100:
        raise ValueError(f"'quality': expected an integer from 1 to 100, got {quality}; correct 'quality' [TM383]")


def dct_matrix() -> Tensor:
    """The orthonormal cosine transform of eight points: [8, 8], float64."""
    index = torch.arange(8, dtype=torch.float64)
    matrix = torch.cos((2 * index + 1) * index[:, None] * math.pi / 16) / 2
    matrix[0] = math.sqrt(1 / 8)
    return matrix
