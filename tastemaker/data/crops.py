"""Squares cut from pictures as ADM and LlamaGen cut them: halved by boxes, then to size by cubic interpolation."""

from __future__ import annotations

import math

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from .image_io import to_uint8


def center_crop(pixels: Tensor, size: int) -> Tensor:
    """The middle square of [3, H, W] in [0, 1], `size` pixels a side."""
    image = resize_shorter_side(pixels, size)
    return crop_at(image, (image.width - size) // 2, (image.height - size) // 2, size)


def resize_shorter_side(pixels: Tensor, shorter: int) -> Image.Image:
    """So that its shorter side has so many pixels."""
    return scale_image(Image.fromarray(to_uint8(pixels[None])[0]), shorter)


def scale_image(image: Image.Image, shorter: int) -> Image.Image:
    """Scale a PIL image so that its shorter side has `shorter` pixels."""
    while min(image.size) >= 2 * shorter:
        image = image.resize((image.width // 2, image.height // 2), Image.Resampling.BOX)
    scale = shorter / min(image.size)
    return image.resize((round(image.width * scale), round(image.height * scale)), Image.Resampling.BICUBIC)


def crop_at(image: Image.Image, left: int, top: int, size: int) -> Tensor:
    part = image.crop((left, top, left + size, top + size))
    return torch.from_numpy(np.array(part)).movedim(-1, 0) / 255


def random_crop(pixels: Tensor, size: int, chance: Tensor, least: float = 0.8) -> Tensor:
    """A square that holds from `least` to all of the shorter side, wherever three uniform numbers put it."""
    scale, down, right = chance.tolist()
    most = math.ceil(size / least)
    image = resize_shorter_side(pixels, size + int(scale * (most - size + 1)))
    return crop_at(image, int(right * (image.width - size + 1)), int(down * (image.height - size + 1)), size)


def center_and_flip(pixels: Tensor, size: int) -> Tensor:
    """The middle square and its mirror image: [2, 3, size, size]."""
    middle = center_crop(pixels, size)
    return torch.stack([middle, middle.flip(-1)])


def ten_crop(pixels: Tensor, size: int, wide: float) -> Tensor:
    """The corners and the middle of a square `wide` times as large, and those of its mirror image."""
    whole = center_crop(pixels, int(size * wide))
    spare = whole.shape[-1] - size
    middle = round(spare / 2)
    places = [(0, 0), (0, spare), (spare, 0), (spare, spare), (middle, middle)]
    return torch.stack([x[:, i : i + size, j : j + size] for x in (whole, whole.flip(-1)) for i, j in places])
