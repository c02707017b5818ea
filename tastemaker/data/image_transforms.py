"""Square crops of images: on encoded images, on full images as ADM and LlamaGen crop them, and on video frames."""

from __future__ import annotations

import math
from collections.abc import Sequence
from io import BytesIO
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image, ImageOps
from torch import Tensor

from ..core.registry import ConfigError
from .image_io import TRANSPARENT_MODES, image_errors, open_image, to_uint8

MIN_CROP = 0.8  # of the shorter side, for random crops


def scale_shorter_side(image: Image.Image, size: int) -> Image.Image:
    """Scale an image so that its shorter side has `size` pixels, as ADM: halved by box filters, then bicubic."""
    while min(image.size) >= 2 * size:
        image = image.resize((image.width // 2, image.height // 2), Image.Resampling.BOX)
    scale = size / min(image.size)
    return image.resize((round(image.width * scale), round(image.height * scale)), Image.Resampling.BICUBIC)


def scaled_size(size: int, draw: float, min_crop: float = MIN_CROP) -> int:
    """The length to scale the shorter side to, so that a crop of `size` holds `min_crop` to all of it."""
    return size + int(draw * (math.ceil(size / min_crop) - size + 1))


def crop_square(image: Image.Image, size: int, draws: Sequence[float] = ()) -> Image.Image:
    """The center square, or one placed by two uniform draws (down, right)."""
    left, top = (image.width - size) // 2, (image.height - size) // 2
    if draws:
        left, top = int(draws[1] * (image.width - size + 1)), int(draws[0] * (image.height - size + 1))
    return image.crop((left, top, left + size, top + size))


def center_crop(pixels: Tensor, size: int) -> Tensor:
    """The center square of [3, H, W] in [0, 1]: [3, size, size]."""
    return _to_float(crop_square(scale_shorter_side(_to_pil(pixels), size), size))


def random_crop(pixels: Tensor, size: int, draws: Tensor, min_crop: float = MIN_CROP) -> Tensor:
    """A square of [3, H, W] with `min_crop` to all of the shorter side, by three uniform draws: [3, size, size]."""
    scale, *place = draws.tolist()
    image = scale_shorter_side(_to_pil(pixels), scaled_size(size, scale, min_crop))
    return _to_float(crop_square(image, size, place))


def center_and_flip(pixels: Tensor, size: int) -> Tensor:
    """The center square and its mirror image: [2, 3, size, size]."""
    center = center_crop(pixels, size)
    return torch.stack([center, center.flip(-1)])


def ten_crop(pixels: Tensor, size: int, crop_range: float) -> Tensor:
    """Corners and center of a center square `crop_range` times as large, and of its mirror image: [10, 3, s, s]."""
    square = center_crop(pixels, int(size * crop_range))
    spare = square.shape[-1] - size
    middle = round(spare / 2)
    corners = [(0, 0), (0, spare), (spare, 0), (spare, spare), (middle, middle)]
    return torch.stack([x[:, i : i + size, j : j + size] for x in (square, square.flip(-1)) for i, j in corners])


def _to_pil(pixels: Tensor) -> Image.Image:
    return Image.fromarray(to_uint8(pixels[None])[0])


def _to_float(image: Image.Image) -> Tensor:
    return torch.from_numpy(np.array(image)).movedim(-1, 0) / 255


def decode_square(
    encoded: Path | bytes, name: str, size: int, draws: Sequence[float] = (), *, grayscale: bool = False
) -> Tensor:
    """Decode and crop in one step: the center square, or a random crop by three draws: [size, size, 3] uint8."""
    shorter = scaled_size(size, draws[0]) if draws else size
    with image_errors(name):
        image = scale_shorter_side(open_rgb(encoded, name, shorter), shorter)
    square = crop_square(image, size, draws[1:])
    return torch.from_numpy(np.array(square.convert("L").convert("RGB") if grayscale else square))


def open_rgb(encoded: Path | bytes, name: str, min_size: int) -> Image.Image:
    """Decode to RGB, upright, over white; a JPEG at the smallest scale with at least `min_size` pixels per side."""
    with open_image(BytesIO(encoded) if isinstance(encoded, bytes) else encoded, name, min_size) as image:
        image.load()
        if image.getexif().get(0x0112, 1) != 1:
            ImageOps.exif_transpose(image, in_place=True)
        return to_rgb(image)


def to_rgb(image: Image.Image) -> Image.Image:
    if image.mode.startswith("I"):  # 16-bit grayscale, which Pillow's own conversion clips at 255
        eight_bit = (np.array(image, np.float32) / 257).round().clip(0, 255).astype(np.uint8)
        return Image.fromarray(eight_bit).convert("RGB")
    if image.mode in TRANSPARENT_MODES or "transparency" in image.info:
        image = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", image.size, "white"), image).convert("RGB")
    return image.convert("RGB")


def check_image_size(size: int | None) -> None:
    """Refuse an `image_size` that no image can have."""
    if size is not None and not 1 <= size <= 16384:
        raise ValueError(f"'image_size': expected 1 to 16384 pixels, got {size}; correct 'image_size' [TM189]")


def center_square(pixels: Tensor, size: int | None) -> Tensor:
    """The center square of frames [F, 3, H, W], resized to `size`; unchanged if `size` is None."""
    if size is None:
        return pixels
    height, width = pixels.shape[-2:]
    side = min(height, width)
    top, left = (height - side) // 2, (width - side) // 2
    square = pixels[..., top : top + side, left : left + side]
    return square if side == size else F.interpolate(square, (size, size), mode="bilinear", antialias=True).clamp(0, 1)


def stretch_to_square(pixels: Tensor, size: int | None) -> Tensor:
    """Frames [F, 3, H, W] stretched to squares, as PaliGemma sees images, so that relative positions are kept."""
    if size is None or pixels.shape[-2:] == (size, size):
        return pixels
    return F.interpolate(pixels, (size, size), mode="bicubic", antialias=True).clamp(0, 1)


def stack_images(images: Sequence[Tensor], names: Sequence[str]) -> Tensor:
    """Stack images [F, 3, H, W] of one shape: [B, F, 3, H, W]; refuses other shapes by name."""
    for image, name in zip(images, names, strict=True):
        if image.shape != images[0].shape:
            (f, _, h, w), (frames, _, height, width) = image.shape, images[0].shape
            raise ConfigError(
                f"{name} has {f} frames of {w}x{h} pixels, but {names[0]} has {frames} of {width}x{height}; set "
                "data.image_size, or use files of one size [TM190]"
            )
    return torch.stack(list(images))
