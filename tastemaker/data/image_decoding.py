"""Encoded pictures to squares of bytes: what a training run would wait for, and nothing beside it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from io import BytesIO
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor

from .crops import scale_image
from .image_io import IMAGE_FORMATS, image_errors

FORMATS = sorted({*IMAGE_FORMATS.values()})
KEPT = 0.8  # of the shorter side, at least, where squares are cut anywhere
SEE_THROUGH = ("RGBA", "LA", "PA", "RGBa", "La")


def decode_square(
    encoded: Path | bytes, name: str, size: int, chance: Sequence[float] = (), *, grey: bool = False
) -> Tensor:
    """The middle square or, by three uniform numbers, one anywhere, as `crops` cuts them: [size, size, 3] bytes."""
    shorter = size + int(chance[0] * (math.ceil(size / KEPT) - size + 1)) if chance else size
    with image_errors(name):
        image = scale_image(open_rgb(encoded, shorter), shorter)
    spare_wide, spare_high = image.width - size, image.height - size
    left, top = spare_wide // 2, spare_high // 2
    if chance:
        left, top = int(chance[2] * (spare_wide + 1)), int(chance[1] * (spare_high + 1))
    part = image.crop((left, top, left + size, top + size))
    return torch.from_numpy(np.array(part.convert("L").convert("RGB") if grey else part))


def to_channels_first(pixels: Tensor) -> Tensor:
    """[S, S, 3] as [3, S, S], by numpy, which takes a third of the time torch does."""
    return torch.from_numpy(np.ascontiguousarray(pixels.numpy().transpose(2, 0, 1)))


def open_rgb(encoded: Path | bytes, least: int) -> Image.Image:
    """In three colours, upright, transparent parts over white; a JPEG at a fraction of its size if that is enough."""
    with Image.open(BytesIO(encoded) if isinstance(encoded, bytes) else encoded, formats=FORMATS) as image:
        image.draft(None, (least, least))  # whole blocks are decoded to fewer pixels, none below `least` a side
        image.load()
        if image.getexif().get(0x0112, 1) != 1:
            ImageOps.exif_transpose(image, in_place=True)
        return to_rgb(image)


def to_rgb(image: Image.Image) -> Image.Image:
    if image.mode.startswith("I"):  # sixteen bits of grey, which Pillow's own conversion would cut off at 255
        eight = (np.array(image, np.float32) / 257).round().clip(0, 255).astype(np.uint8)
        return Image.fromarray(eight).convert("RGB")
    if image.mode in SEE_THROUGH or "transparency" in image.info:
        image = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", image.size, "white"), image).convert("RGB")
    return image.convert("RGB")
