"""Pixels to files and back; videos go through PyAV in `video_io.py`, everything else through Pillow.

A clip in a PNG is an animated one: without loss, and played by whatever shows a PNG. A clip in a folder is a still a
frame; of folders that end in .frames this is known without being told.
"""

from __future__ import annotations

import importlib.util
import math
import os
import re
import shutil
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont, ImageOps, ImageSequence
from torch import Tensor

from ..core.errors import ImageError as ImageError

IMAGE_FORMATS = {".png": "PNG", ".jpg": "JPEG", ".jpeg": "JPEG", ".webp": "WEBP"}
VIDEO_SUFFIX = ".mp4"  # as clips are written
VIDEO_SUFFIXES = (VIDEO_SUFFIX, ".m4v", ".mov", ".webm", ".mkv", ".avi")  # that are read
FOLDER = ".frames"
WRITTEN, KNOWN = ", ".join([*IMAGE_FORMATS, ".gif", VIDEO_SUFFIX]), ", ".join([*IMAGE_FORMATS, ".gif", *VIDEO_SUFFIXES])


def to_uint8(pixels: Tensor) -> NDArray[np.uint8]:
    """Pixels [..., 3, H, W] in [0, 1] as bytes [..., H, W, 3], rounded to the nearest; NaN is black."""
    rounded = (pixels.detach().float().nan_to_num(0.0) * 255).round().clamp(0, 255).to(torch.uint8)
    array: NDArray[np.uint8] = rounded.movedim(-3, -1).contiguous().cpu().numpy()
    return array


def save_image(pixels: Tensor, path: Path, frames_per_second: int = 8) -> None:
    """Write pixels [F, 3, H, W] as what the suffix says; the file appears whole or not at all."""
    suffix, frames = path.suffix.lower(), to_uint8(pixels)
    if suffix not in {*IMAGE_FORMATS, ".gif", VIDEO_SUFFIX, FOLDER}:
        raise ImageError(f"{path} cannot be written; expected a name that ends in one of {WRITTEN}, {FOLDER}")
    if frames_per_second < 1:
        raise ImageError(f"{path} would show {frames_per_second} frames a second; expected 1 or more")
    if suffix in IMAGE_FORMATS and suffix != ".png" and len(frames) > 1:
        raise ImageError(f"{path} is a still, but there are {len(frames)} frames; write them as .png, .mp4 or .gif")
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.partial")
    if suffix == FOLDER:
        return _save_frames(frames, partial, path)
    if suffix == VIDEO_SUFFIX:
        _movies(path).write_video(frames, partial, frames_per_second)
    else:
        _save(frames, partial, "GIF" if suffix == ".gif" else IMAGE_FORMATS[suffix], frames_per_second)
    return os.replace(partial, path)


def _save_frames(frames: NDArray[np.uint8], partial: Path, path: Path) -> None:
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    for number, frame in enumerate(frames):
        Image.fromarray(frame).save(partial / f"{number:05d}.png")
    shutil.rmtree(path, ignore_errors=True)
    os.replace(partial, path)


def _save(frames: NDArray[np.uint8], file: Path | BytesIO, form: str, frames_per_second: int) -> None:
    first, *others = [Image.fromarray(frame) for frame in frames]
    if form != "GIF" and not others:
        return first.save(file, form)
    # Frames alike would be written as one that lasts, but for the ways to blend, which are one for opaque frames.
    ways = {} if form == "GIF" else {"blend": [k % 2 for k in range(len(frames))]}
    pace = 1000 // frames_per_second
    return first.save(file, form, save_all=True, append_images=others, duration=pace, loop=0, **ways)


def video_suffix() -> Literal["mp4", "png"]:
    """What clips are written as where nothing is asked for: MP4, which is small, or PNG where there is no PyAV."""
    return "mp4" if importlib.util.find_spec("av") else "png"


def read_image(path: Path) -> Tensor:
    """The frames of a file in [0, 1], transparent parts over white: [F, 3, H, W]."""
    if path.is_dir():
        return _read_frames(path)
    if not path.is_file():
        raise ImageError(f"there is no picture at {path}; check the path")
    if path.suffix.lower() not in {*IMAGE_FORMATS, ".gif", *VIDEO_SUFFIXES}:
        raise ImageError(f"{path} is no picture that can be read; expected one of {KNOWN}")
    if path.suffix.lower() in VIDEO_SUFFIXES:
        with image_errors(str(path), "clip"):
            return torch.from_numpy(_movies(path).read_video(path)).movedim(-1, -3) / 255
    with image_errors(str(path)), Image.open(path) as image:
        return torch.stack([_rgb(frame) for frame in ImageSequence.Iterator(image)])


def _read_frames(folder: Path) -> Tensor:
    """The frames of a folder, in the order of the numbers their names end in."""
    files = [
        file for file in folder.iterdir() if file.suffix.lower() in IMAGE_FORMATS and not file.name.startswith(".")
    ]
    numbers = {file: re.search(r"(\d+)$", file.stem) for file in files}
    plain = next((file.name for file, number in numbers.items() if number is None), None)
    if not files or plain:
        found = f"{plain} in it" if plain else "no picture in it"
        raise ImageError(f"{folder} is no clip: there is {found}; expected frames such as 00000.png, 00001.png")
    order = {int(number[1]): file for file, number in numbers.items() if number}
    lost = sorted({*range(min(order), max(order) + 1)} - {*order})
    if lost or len(order) < len(files):
        told = f"frame {lost[0]} is missing" if lost else "two frames have one number"
        raise ImageError(f"{folder} is no whole clip: {told}; expected each number from {min(order)} on once")
    frames = [read_image(order[number])[0] for number in sorted(order)]
    sizes = {tuple(frame.shape[1:]): None for frame in frames}
    if len(sizes) > 1:
        (high, wide), (other, broad), *_ = sizes
        raise ImageError(f"{folder} has frames of {high}x{wide} and {other}x{broad}; expected one size")
    return torch.stack(frames)


def image_size(path: Path) -> tuple[int, int]:
    """Height and width of a file, as it is to be shown, without decoding it if it is a still."""
    if path.suffix.lower() not in IMAGE_FORMATS or not path.is_file():
        height, width = read_image(path).shape[-2:]
        return height, width
    with image_errors(str(path)), Image.open(path) as image:
        turned = image.getexif().get(0x0112, 1) >= 5  # the camera was held upright
        return (image.width, image.height) if turned else (image.height, image.width)


def resize_lanczos(pixels: Tensor, height: int, width: int) -> Tensor:
    """Pixels [F, 3, H, W] at another size, by Lanczos' filter."""
    if pixels.shape[-2:] == (height, width):
        return pixels
    frames = [Image.fromarray(frame).resize((width, height), Image.Resampling.LANCZOS) for frame in to_uint8(pixels)]
    return torch.stack([_rgb(frame) for frame in frames])


def resize_area(pixels: Tensor, height: int, width: int) -> Tensor:
    """Pixels [B, F, 3, H, W] at another size where they are, by averaging."""
    if pixels.shape[-2:] == (height, width):
        return pixels
    flat = F.interpolate(pixels.flatten(0, 1).float(), (height, width), mode="bilinear", antialias=True)
    return flat.view(*pixels.shape[:3], height, width).clamp(0, 1)


def decode_image(data: bytes, name: str, limit: int) -> Tensor:
    """The frames of a still, an animated PNG or a GIF in memory, of at most so many numbers: [F, 3, H, W]."""
    with image_errors(name), Image.open(BytesIO(data), formats=[*{*IMAGE_FORMATS.values(), "GIF"}]) as image:
        frames, room = [], limit
        for frame in ImageSequence.Iterator(image):
            room -= 3 * frame.width * frame.height
            if room < 0:
                raise ImageError(f"{name} unfolds to more than {limit} numbers; send a smaller one")
            frames.append(_rgb(frame))
        return torch.stack(frames)


def encode_png(pixels: Tensor) -> bytes:
    """Pixels [F, 3, H, W] as a PNG, animated if there are several frames."""
    file = BytesIO()
    _save(to_uint8(pixels), file, "PNG", 8)
    return file.getvalue()


@contextmanager
def image_errors(name: str, kind: str = "picture") -> Iterator[None]:
    """Within the block whatever a broken picture raises becomes a sentence."""
    try:
        yield
    except ImageError:
        raise
    except (OSError, ValueError, SyntaxError, EOFError, struct.error, Image.DecompressionBombError) as error:
        raise ImageError(f"{name} cannot be read as a {kind} ({error}); make it again or remove it") from error


def _rgb(image: Image.Image) -> Tensor:
    """One frame in [0, 1]: [3, H, W]."""
    image = ImageOps.exif_transpose(image)
    if image.mode.startswith("I"):  # sixteen bits of grey, which Pillow's own conversion would cut off at 255
        return torch.from_numpy(np.array(image, np.float32) / 65535).expand(3, -1, -1)
    image = image.convert("RGBA")
    white = Image.new("RGBA", image.size, "white")
    return torch.from_numpy(np.array(Image.alpha_composite(white, image).convert("RGB"))).movedim(-1, 0) / 255


def _movies(path: Path) -> Any:
    """PyAV's half of this module, imported late because stills must do without it."""
    try:
        from . import video_io
    except ImportError as error:
        raise ImageError(f"{path} needs PyAV ({error}); install av, or use .gif") from error
    return video_io


LEAST = 160  # pixels of the longer side of a sample in a grid
CAPTION = 32  # pixels of the words below it


def grid_upscale(height: int, width: int, least: int = LEAST) -> int:
    """How often a grid enlarges its samples."""
    return max(1, math.ceil(least / max(height, width)))


def grid_boxes(count: int, height: int, width: int) -> list[tuple[int, int, int, int]]:
    """Where the samples of a captioned grid lie: left, top, right and bottom of each."""
    columns, scale = math.ceil(math.sqrt(count)), grid_upscale(height, width)
    high, wide = height * scale, width * scale
    corners = [(2 + i % columns * (wide + 4), 2 + i // columns * (high + CAPTION + 4)) for i in range(count)]
    return [(left, top, left + wide, top + high) for left, top in corners]


def make_grid(pixels: Tensor, columns: int | None = None, captions: Sequence[str] = (), least: int = LEAST) -> Tensor:
    """Samples [B, F, 3, H, W] side by side, small ones enlarged to `least` pixels: [F, 3, H', W']."""
    columns = columns or math.ceil(math.sqrt(len(pixels)))
    scale = grid_upscale(pixels.shape[-2], pixels.shape[-1], least)
    cells = pixels.detach().float().cpu().repeat_interleave(scale, -1).repeat_interleave(scale, -2)
    if captions:
        labels = torch.stack([_label(caption, cells.shape[-1]) for caption in captions])  # [B, 3, h, W]
        cells = torch.cat([cells, labels[:, None].expand(-1, cells.shape[1], -1, -1, -1)], 3)
    cells = torch.nn.functional.pad(cells, (2, 2, 2, 2), value=1.0)
    rows = math.ceil(len(cells) / columns)
    blank = cells.new_ones(rows * columns - len(cells), *cells.shape[1:])
    whole = torch.cat([cells, blank]).view(rows, columns, *cells.shape[1:])  # [R, C, F, 3, h, w]
    return whole.permute(2, 3, 0, 4, 1, 5).flatten(4, 5).flatten(2, 3)


def make_contact_sheet(pixels: Tensor, captions: Sequence[str] = (), frames: int = 4) -> Tensor:
    """One still of samples [B, F, 3, H, W], a clip as a row of a few of its frames: [3, H', W']."""
    if pixels.shape[1] == 1:
        return make_grid(pixels, captions=captions)[0]
    count = min(frames, pixels.shape[1])
    picks = torch.linspace(0, pixels.shape[1] - 1, count).round().long()
    each = [caption if k == 0 else "" for caption in captions for k in range(count)]
    return make_grid(pixels[:, picks].flatten(0, 1)[:, None], columns=count, captions=each)[0]


def _label(caption: str, width: int, lines: int = 2, size: int = 12) -> Tensor:
    """Black words on white, broken into lines that fit and cut off after the last: [3, h, width]."""
    font = ImageFont.load_default(size)
    image = Image.new("RGB", (width, CAPTION), "white")
    ImageDraw.Draw(image).multiline_text((2, 1), _broken(caption, font, width - 4, lines), "black", font, spacing=3)
    return torch.from_numpy(np.array(image)).movedim(-1, 0) / 255


def _broken(caption: str, font: Any, width: int, lines: int) -> str:
    broken = [""]
    for word in caption.split():
        longer = f"{broken[-1]} {word}".strip()
        if font.getlength(longer) <= width or not broken[-1]:
            broken[-1] = longer
        else:
            broken.append(word)
    if len(broken) > lines:
        broken = [*broken[: lines - 1], " ".join(broken[lines - 1 :])]
    return "\n".join(_cut(line, font, width) for line in broken)


def _cut(line: str, font: Any, width: int) -> str:
    if font.getlength(line) <= width:
        return line
    while line and font.getlength(line + "...") > width:
        line = line[:-1]
    return line + "..."
