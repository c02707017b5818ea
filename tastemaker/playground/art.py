"""Sprites of the playground: 48 COCO classes in two drawing styles, and GenEval's ten colors to dye them."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Literal, get_args

import numpy as np
import torch
from torch import Tensor

ART = Path(__file__).parent / "art"
Style = Literal["noto", "twemoji"]

# fmt: off
CLASSES: tuple[str, ...] = (
    "person", "bicycle", "car", "motorcycle", "airplane", "bus", "train", "truck", "boat", "teddy bear",
    "potted plant", "cell phone", "wine glass", "sports ball", "bird", "cat", "dog", "horse", "sheep", "cow",
    "elephant", "bear", "zebra", "giraffe", "backpack", "umbrella", "handbag", "suitcase", "kite", "cup",
    "bowl", "banana", "apple", "broccoli", "carrot", "pizza", "donut", "cake", "chair", "couch",
    "bed", "toilet", "tv", "laptop", "book", "clock", "vase", "scissors",
)
# fmt: on
COLORS: dict[str, tuple[float, float, float]] = {
    "red": (0.90, 0.10, 0.12),
    "orange": (1.00, 0.55, 0.05),
    "yellow": (0.98, 0.88, 0.12),
    "green": (0.15, 0.68, 0.22),
    "blue": (0.15, 0.35, 0.95),
    "purple": (0.52, 0.14, 0.78),
    "pink": (1.00, 0.50, 0.76),
    "brown": (0.50, 0.28, 0.12),
    "black": (0.10, 0.10, 0.11),
    "white": (0.97, 0.97, 0.97),
}
MIN_ALPHA = 0.3  # of a pixel that counts as part of an object


@lru_cache(maxsize=2)
def load_sprites(style: Style = "noto") -> Tensor:
    """The sprites of all classes in their natural colors: [48, 4, 32, 32] in [0, 1], straight alpha."""
    if style not in get_args(Style):
        raise ValueError(f"unknown drawing style '{style}'; expected one of {', '.join(get_args(Style))} [TM751]")
    with np.load(ART / f"{style}.npz", allow_pickle=False) as file:
        assert tuple(file["names"].tolist()) == CLASSES
        return torch.from_numpy(file["sprites"]).permute(0, 3, 1, 2).float() / 255


@lru_cache(maxsize=8)
def build_atlas(style: Style = "noto", device: torch.device | str = "cpu") -> Tensor:
    """The sprites in every color, 0 the natural one and then COLORS: [48, 11, 4, 32, 32], premultiplied alpha."""
    own = load_sprites(style)
    dyed = torch.stack([own, *(_dyed(own, torch.tensor(color)) for color in COLORS.values())], 1)
    return torch.cat([dyed[:, :, :3] * dyed[:, :, 3:], dyed[:, :, 3:]], 2).to(device)


@lru_cache(maxsize=2)
def sprite_extents(style: Style = "noto") -> Tensor:
    """Width and height of every object relative to its square: [48, 2]."""
    shows = load_sprites(style)[:, 3] > MIN_ALPHA
    return torch.stack([_length(shows.any(1)), _length(shows.any(2))], 1) / shows.shape[-1]


def _length(shows: Tensor) -> Tensor:
    """Length from the first to the last visible pixel: [48]."""
    first, last = shows.float().argmax(1), shows.shape[1] - 1 - shows.flip(1).float().argmax(1)
    return (last - first + 1).float()


def _dyed(own: Tensor, color: Tensor) -> Tensor:
    """Map brightness to a ramp from dark over the color to light, which keeps inner edges."""
    brightness = _brightness(own)  # [48, 1, 32, 32]
    dark, middle, light = (end.view(3, 1, 1) for end in _ramp(color))
    lower, upper = middle + (middle - dark) * brightness, middle + (light - middle) * brightness
    return torch.cat([torch.where(brightness < 0, lower, upper).clamp(0, 1), own[:, 3:]], 1)


def _ramp(color: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Dark, middle and light end of a color; black and white keep some contrast with ramps of their own."""
    if color.max() < 0.2:
        return torch.zeros(3), color, torch.full((3,), 0.42)
    if color.min() > 0.9:
        return 0.45 * color, 0.95 * color, torch.ones(3)
    return 0.35 * color, color, color + 0.45 * (1 - color)


def _brightness(own: Tensor) -> Tensor:
    """Luminance relative to an object's median, scaled by its 5 % and 95 % quantiles: [48, 1, 32, 32] in [-1, 1]."""
    luminance = (own[:, :3] * torch.tensor([0.299, 0.587, 0.114]).view(3, 1, 1)).sum(1)
    shown = luminance.masked_fill(own[:, 3] <= MIN_ALPHA, torch.nan).flatten(1)
    low, middle, high = torch.nanquantile(shown, torch.tensor([0.05, 0.5, 0.95]), dim=1).view(3, -1, 1, 1)
    # Relative to the median: relative to the mean, dark objects with a few highlights would get a wrong hue.
    away = torch.where(luminance < middle, middle - low, high - middle).clamp(min=0.15)
    brightness: Tensor = ((luminance - middle) / away).clamp(-1, 1)
    return brightness[:, None]
