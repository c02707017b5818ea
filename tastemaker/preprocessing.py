"""Pixels as pretrained networks want them, by differentiable steps: the same for scoring and for gradients."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch.nn.functional as F
from torch import Tensor

Triple = tuple[float, float, float]
CLIP_MEAN: Triple = (0.48145466, 0.4578275, 0.40821073)
CLIP_STD: Triple = (0.26862954, 0.26130258, 0.27577711)
IMAGENET_MEAN: Triple = (0.485, 0.456, 0.406)
IMAGENET_STD: Triple = (0.229, 0.224, 0.225)


@dataclass(frozen=True)
class Preprocessing:
    """Resize, fit into a square and normalise; agrees with the usual processors of PIL pictures to a thousandth."""

    size: int = 224
    fit: Literal["crop", "pad", "stretch"] = "crop"  # the shorter side fits, the longer one does, or both do
    mode: Literal["bicubic", "bilinear"] = "bicubic"
    mean: Triple = CLIP_MEAN
    std: Triple = CLIP_STD

    def __call__(self, pixels: Tensor) -> Tensor:
        """Pictures [N, 3, H, W] in [0, 1] to [N, 3, size, size]."""
        height, width = self._sides(*pixels.shape[-2:])
        if (height, width) != tuple(pixels.shape[-2:]):
            pixels = F.interpolate(pixels, (height, width), mode=self.mode, antialias=True)
        # PIL clips what a bicubic filter overshoots, so the processors do too.
        pixels = self._square(pixels.clamp(0, 1))
        mean, std = (pixels.new_tensor(x)[:, None, None] for x in (self.mean, self.std))
        return (pixels - mean) / std

    def _sides(self, height: int, width: int) -> tuple[int, int]:
        if self.fit == "stretch":
            return self.size, self.size
        fitted = min(height, width) if self.fit == "crop" else max(height, width)
        longer = [max(1, int(self.size * side / fitted)) for side in (height, width)]
        return longer[0], longer[1]

    def _square(self, pixels: Tensor) -> Tensor:
        height, width = pixels.shape[-2:]
        if self.fit == "pad":
            top, left = (self.size - height) // 2, (self.size - width) // 2
            return F.pad(pixels, (left, self.size - width - left, top, self.size - height - top))
        top, left = (height - self.size) // 2, (width - self.size) // 2
        return pixels[..., top : top + self.size, left : left + self.size]
