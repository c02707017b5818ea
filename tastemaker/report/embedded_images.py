"""Samples as data URIs: cut out of their grids, at their own size, and small enough to travel in a page."""

from __future__ import annotations

import base64
import io
from dataclasses import dataclass
from typing import Any

import torch
from PIL import Image

from ..data.image_io import ImageError, read_image, to_uint8
from .run_record import SampleGrid

MAX_SIDE = 512  # pixels of the longer side of a picture in the page
MAX_PNG_SIDE = 128  # pixels a side up to which pictures stay as they are, without loss
FRAMES_PER_STRIP = 4  # frames a clip is shown by
MAX_VIDEO_BYTES = 3 * 2**20  # bytes up to which a clip moves in the page
KINDS = {".png": "image/png", ".jpg": "image/jpeg", ".mp4": "video/mp4", ".gif": "image/gif"}


@dataclass(frozen=True)
class EmbeddedImage:
    """A picture in the page; a clip is a strip of some of its frames."""

    source: str  # data URI
    width: int
    height: int

    @property
    def small(self) -> bool:
        return self.height <= MAX_PNG_SIDE


def embed_samples(sheet: SampleGrid, count: int, longest: int = MAX_SIDE) -> list[EmbeddedImage]:
    """The first so many samples of a sheet; none if it cannot be read."""
    try:
        frames = read_image(sheet.path)  # [F, 3, H, W]
    except ImageError:
        return []
    picks = torch.linspace(0, len(frames) - 1, min(FRAMES_PER_STRIP, len(frames))).round().long()
    shown: list[EmbeddedImage] = []
    for left, top, right, bottom in sheet.boxes[:count]:
        cells = [Image.fromarray(each) for each in to_uint8(frames[picks, :, top:bottom, left:right])]
        # Nearest is exact, for grids enlarge by whole numbers; movies are not exact, so they are averaged.
        way = Image.Resampling.NEAREST if len(cells) == 1 else Image.Resampling.BOX
        shown.append(
            encode_image(concatenate_frames([cell.resize(sheet.size, way) for cell in cells]), longest * len(cells))
        )
    return shown


def concatenate_frames(cells: list[Image.Image]) -> Image.Image:
    if len(cells) == 1:
        return cells[0]
    width, height = cells[0].size
    gap = max(1, width // 24)
    strip = Image.new("RGB", (len(cells) * (width + gap) - gap, height), "grey")
    for i, cell in enumerate(cells):
        strip.paste(cell, (i * (width + gap), 0))
    return strip


def encode_image(image: Image.Image, longest: int) -> EmbeddedImage:
    """PNG if small, else JPEG of at most so many pixels a side."""
    small = image.height <= MAX_PNG_SIDE
    if max(image.size) > longest:
        image.thumbnail((longest, longest), Image.Resampling.LANCZOS)
    buffer = io.BytesIO()
    settings: dict[str, Any] = {"optimize": True} if small else {"quality": 88}
    image.save(buffer, "PNG" if small else "JPEG", **settings)
    return EmbeddedImage(data_uri(buffer.getvalue(), ".png" if small else ".jpg"), *image.size)


def embed_video(sheet: SampleGrid) -> str | None:
    """Clips as they are, if a page can bear them."""
    if sheet.frames == 1 or sheet.path.suffix not in KINDS or sheet.path.stat().st_size > MAX_VIDEO_BYTES:
        return None
    return data_uri(sheet.path.read_bytes(), sheet.path.suffix)


def data_uri(content: bytes, suffix: str) -> str:
    return f"data:{KINDS[suffix]};base64,{base64.b64encode(content).decode('ascii')}"
