"""Differentiable image preprocessing of pretrained networks; scores and gradients use the same steps."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

Triple = tuple[float, float, float]
CLIP_MEAN: Triple = (0.48145466, 0.4578275, 0.40821073)
CLIP_STD: Triple = (0.26862954, 0.26130258, 0.27577711)
IMAGENET_MEAN: Triple = (0.485, 0.456, 0.406)
IMAGENET_STD: Triple = (0.229, 0.224, 0.225)


@dataclass(frozen=True)
class Preprocessing:
    """Resize to a square and normalize; agrees with the usual processors of PIL images to a thousandth."""

    size: int = 224
    resize_mode: Literal["crop", "pad", "stretch"] = "crop"  # the shorter side fits, the longer one, or both
    interpolation: Literal["bicubic", "bilinear"] = "bicubic"
    mean: Triple = CLIP_MEAN
    std: Triple = CLIP_STD
    overshoot: Literal["clip", "keep"] = "clip"  # of bicubic filters: PIL clips it, torchvision keeps it for tensors
    crop_rounding: Literal["floor", "round"] = "floor"  # of an odd crop: transformers rounds down, torchvision to even

    def __call__(self, pixels: Tensor) -> Tensor:
        """Images [N, 3, H, W] in [0, 1] to [N, 3, size, size]."""
        height, width = self._resized_size(*pixels.shape[-2:])
        if (height, width) != tuple(pixels.shape[-2:]):
            pixels = F.interpolate(pixels, (height, width), mode=self.interpolation, antialias=True)
        pixels = self._crop_or_pad(pixels.clamp(0, 1) if self.overshoot == "clip" else pixels)
        mean, std = (pixels.new_tensor(x)[:, None, None] for x in (self.mean, self.std))
        return (pixels - mean) / std

    def _resized_size(self, height: int, width: int) -> tuple[int, int]:
        if self.resize_mode == "stretch":
            return self.size, self.size
        if self.resize_mode == "pad":
            scale = self.size / max(height, width)
            return max(1, round(height * scale)), max(1, round(width * scale))
        shorter = min(height, width)
        return int(self.size * height / shorter), int(self.size * width / shorter)

    def _crop_or_pad(self, pixels: Tensor) -> Tensor:
        height, width = pixels.shape[-2:]
        if self.resize_mode == "pad":
            top, left = (self.size - height) // 2, (self.size - width) // 2
            return F.pad(pixels, (left, self.size - width - left, top, self.size - height - top))
        margins = [(side - self.size) / 2 for side in (height, width)]
        top, left = (round(x) if self.crop_rounding == "round" else int(x) for x in margins)
        return pixels[..., top : top + self.size, left : left + self.size]


@dataclass(frozen=True)
class NaflexPreprocessing:
    """SigLIP 2 NaFlex: resize to as many whole patches as allowed, nearly at the image's aspect ratio, and pad them."""

    patch_size: int = 16
    max_patches: int = 256
    mean: Triple = (0.5, 0.5, 0.5)
    std: Triple = (0.5, 0.5, 0.5)

    def __call__(self, pixels: Tensor) -> dict[str, Any]:
        """Network inputs of images [N, 3, H, W] in [0, 1]; `pixel_values` are patches [N, max_patches, P * P * 3]."""
        rows, columns = self.grid_size(*pixels.shape[-2:])
        size = (rows * self.patch_size, columns * self.patch_size)
        pixels = F.interpolate(pixels, size, mode="bilinear", antialias=True)
        mean, std = (pixels.new_tensor(x)[:, None, None] for x in (self.mean, self.std))
        grid = ((pixels - mean) / std).reshape(-1, 3, rows, self.patch_size, columns, self.patch_size)
        patches = grid.permute(0, 2, 4, 3, 5, 1).flatten(3).flatten(1, 2)
        mask = torch.ones(len(pixels), self.max_patches, dtype=torch.long, device=pixels.device)
        mask[:, patches.shape[1] :] = 0
        return {
            "pixel_values": F.pad(patches, (0, 0, 0, self.max_patches - patches.shape[1])),
            "pixel_attention_mask": mask,
            "spatial_shapes": torch.tensor([[rows, columns]] * len(pixels), device=pixels.device),
        }

    def grid_size(self, height: int, width: int) -> tuple[int, int]:
        """Rows and columns of patches at the largest scale at which they are not too many."""
        low, high = 1e-6, 100.0
        while high - low >= 1e-5:  # bisection to this precision, as published: another differs by a patch
            middle = (low + high) / 2
            rows, columns = self._num_patches(height, middle), self._num_patches(width, middle)
            low, high = (middle, high) if rows * columns <= self.max_patches else (low, middle)
        return self._num_patches(height, low), self._num_patches(width, low)

    def _num_patches(self, side: int, scale: float) -> int:
        return max(1, math.ceil(side * scale / self.patch_size))
