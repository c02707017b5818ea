"""Pictures in their own proportions, as SigLIP 2 takes them when it is called NaFlex."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .preprocessing import Triple


@dataclass(frozen=True)
class NaflexPreprocessing:
    """As many whole patches as allowed, nearly in the picture's proportions, in a row each and filled up with none."""

    patch: int = 16
    most: int = 256  # patches
    mean: Triple = (0.5, 0.5, 0.5)
    std: Triple = (0.5, 0.5, 0.5)

    def __call__(self, pixels: Tensor) -> dict[str, Any]:
        rows, columns = self.shape(*pixels.shape[-2:])
        pixels = F.interpolate(pixels, (rows * self.patch, columns * self.patch), mode="bilinear", antialias=True)
        mean, std = (pixels.new_tensor(x)[:, None, None] for x in (self.mean, self.std))
        cut = ((pixels - mean) / std).reshape(-1, 3, rows, self.patch, columns, self.patch)
        patches = cut.permute(0, 2, 4, 3, 5, 1).flatten(3).flatten(1, 2)  # [B, rows * columns, patch * patch * 3]
        empty = self.most - patches.shape[1]
        mask = torch.ones(len(pixels), self.most, dtype=torch.long, device=pixels.device)
        mask[:, patches.shape[1] :] = 0
        return {
            "pixel_values": F.pad(patches, (0, 0, 0, empty)),
            "pixel_attention_mask": mask,
            "spatial_shapes": torch.tensor([[rows, columns]] * len(pixels), device=pixels.device),
        }

    def shape(self, height: int, width: int) -> tuple[int, int]:
        """Rows and columns of patches at the largest scale at which they are not too many."""
        low, high = 1e-6, 100.0
        while high - low >= 1e-5:  # by halves and to this precision, as published: other numbers differ by a patch
            middle = (low + high) / 2
            rows, columns = self._patches(height, middle), self._patches(width, middle)
            low, high = (middle, high) if rows * columns <= self.most else (low, middle)
        return self._patches(height, low), self._patches(width, low)

    def _patches(self, side: int, scale: float) -> int:
        return max(1, math.ceil(side * scale / self.patch))
