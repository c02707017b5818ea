"""Images in the metadata of prompts: sources of edits, targets, masks and references."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

from torch import Tensor

from .image_io import read_image


def read_metadata_images(value: object) -> tuple[Tensor, ...] | None:
    """The images [3, H, W] in [0, 1] of a path, of pixels [3, H, W] or [F, 3, H, W], or of a list of those.

    Of a video it is the first frame. None if anything else is among them, or nothing.
    """
    values = value if isinstance(value, (list, tuple)) else [value]
    images = [_read(Path(each)) if isinstance(each, (str, Path)) else each for each in values]
    pixels = [each for each in images if isinstance(each, Tensor) and each.ndim in (3, 4) and each.shape[-3] == 3]
    if not pixels or len(pixels) < len(images):
        return None
    return tuple(each if each.ndim == 3 else each[0] for each in pixels)


@lru_cache(maxsize=64)
def _read(path: Path) -> Tensor:
    return read_image(path)
