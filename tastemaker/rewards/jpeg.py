"""How small, or how large, the JPEG of a picture is (DDPO, Black et al. 2023)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from io import BytesIO
from typing import ClassVar, Literal, Self

import torch
from PIL import Image
from torch import Tensor

from ..core.reward import BatchSize, RewardCard
from ..core.types import Metadata, Placement, Prompts
from ..data.image_io import to_uint8


@dataclass(frozen=True)
class Jpeg:
    """Minus the kilobytes of each picture's JPEG if it is to be compressible, plus if incompressible."""

    sign: Literal["compressible", "incompressible"] = "compressible"
    quality: int = 95
    batch_size: BatchSize = 64
    about: ClassVar[RewardCard] = RewardCard(
        range="-300 to 300 kilobytes", hacked_by="plain fields for compressible, noise for incompressible"
    )
    differentiable: ClassVar[bool] = False
    reads: ClassVar[Literal["frames"]] = "frames"
    runs_on: ClassVar[Literal["host"]] = "host"

    def __post_init__(self) -> None:
        if not 1 <= self.quality <= 100:
            raise ValueError(f"a JPEG's quality is {self.quality}; expected a whole number from 1 to 100")

    def load(self, placement: Placement) -> Self:
        return self

    def tiny(self) -> Self:
        return self

    def score(self, pixels: Tensor, prompts: Prompts, facts: Sequence[Metadata]) -> Tensor:
        sizes = torch.tensor([self._kilobytes(picture) for picture in pixels[:, 0]])
        return -sizes if self.sign == "compressible" else sizes

    def _kilobytes(self, picture: Tensor) -> float:
        file = BytesIO()
        Image.fromarray(to_uint8(picture)).save(file, "JPEG", quality=self.quality)
        return file.tell() / 1000
