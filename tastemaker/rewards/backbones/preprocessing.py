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
    overshoot: Literal["clip", "keep"] = "clip"  # of bicubic filters: PIL clips it, torchvision's for tensors keep it
    corner: Literal["floor", "round"] = "floor"  # of an odd crop: transformers rounds down, torchvision to even

    def __call__(self, pixels: Tensor) -> Tensor:
        """Pictures [N, 3, H, W] in [0, 1] to [N, 3, size, size]."""
        height, width = self._sides(*pixels.shape[-2:])
        if (height, width) != tuple(pixels.shape[-2:]):
            pixels = F.interpolate(pixels, (height, width), mode=self.mode, antialias=True)
        pixels = self._square(pixels.clamp(0, 1) if self.overshoot == "clip" else pixels)
        mean, std = (pixels.new_tensor(x)[:, None, None] for x in (self.mean, self.std))
        return (pixels - mean) / std

    def _sides(self, height: int, width: int) -> tuple[int, int]:
        if self.fit == "stretch":
            return self.size, self.size
        if self.fit == "pad":
            scale = self.size / max(height, width)
            return max(1, round(height * scale)), max(1, round(width * scale))
        shorter = min(height, width)
        return int(self.size * height / shorter), int(self.size * width / shorter)

    def _square(self, pixels: Tensor) -> Tensor:
        height, width = pixels.shape[-2:]
        if self.fit == "pad":
            top, left = (self.size - height) // 2, (self.size - width) // 2
            return F.pad(pixels, (left, self.size - width - left, top, self.size - height - top))
        over = [(side - self.size) / 2 for side in (height, width)]
        top, left = (round(x) if self.corner == "round" else int(x) for x in over)
        return pixels[..., top : top + self.size, left : left + self.size]
