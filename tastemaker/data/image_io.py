"""Read and write images and videos: videos through PyAV in `video_io.py`, everything else through Pillow.

A video is a video file, an animated PNG (lossless) or GIF, or a folder with one image per frame, whose name ends in
.frames when it is written.
"""

from __future__ import annotations

import importlib.util
import math
import os
import re
import shutil
import struct
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from io import BytesIO
from pathlib import Path
from threading import Lock
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont, ImageOps
from torch import Tensor

from ..core.errors import ConfigError
from ..core.errors import ImageError as ImageError
from ..core.text_layout import wrap_text

IMAGE_FORMATS = {".png": "PNG", ".jpg": "JPEG", ".jpeg": "JPEG", ".webp": "WEBP"}
VIDEO_SUFFIX = ".mp4"  # of videos that are written
VIDEO_SUFFIXES = (VIDEO_SUFFIX, ".m4v", ".mov", ".webm", ".mkv", ".avi")  # of videos that are read
FRAMES_SUFFIX = ".frames"
WRITABLE_SUFFIXES = ", ".join([*IMAGE_FORMATS, ".gif", VIDEO_SUFFIX])
ORIENTATION = 0x0112  # key of EXIF
TRANSPARENT_MODES = ("RGBA", "LA", "PA", "RGBa", "La")
ANIMATED_FORMATS = ("PNG", "GIF", "WEBP")
READABLE_FORMATS = sorted({*IMAGE_FORMATS.values(), "GIF"})
MAX_MEGAPIXELS = 64  # of an image, which takes 16 bytes per pixel while it is read, and 12 afterwards
VIDEO_FACTOR = 2  # times as many may be in all frames of a video together
STRIP_PIXELS = 2**21  # converted at a time, because each step of the conversion copies them
LIMIT_VARIABLE = "TASTEMAKER_MAX_MEGAPIXELS"
PILLOW_LIMIT = Lock()
# What Pillow and PyAV raise for broken files.
DECODING_ERRORS: tuple[type[Exception], ...] = (
    OSError,
    ValueError,
    SyntaxError,
    EOFError,
    LookupError,
    TypeError,
    AttributeError,
    ArithmeticError,
)
DECODING_ERRORS += (struct.error, zlib.error, MemoryError, Image.DecompressionBombError)
READABLE_SUFFIXES = ", ".join([*IMAGE_FORMATS, ".gif", *VIDEO_SUFFIXES])


def to_uint8(pixels: Tensor) -> NDArray[np.uint8]:
    """Pixels [..., 3, H, W] in [0, 1] as uint8 [..., H, W, 3], rounded to nearest; NaN becomes 0."""
    rounded = (pixels.detach().float().nan_to_num(0.0) * 255).round().clamp(0, 255).to(torch.uint8)
    array: NDArray[np.uint8] = rounded.movedim(-3, -1).contiguous().cpu().numpy()
    return array


def save_image(pixels: Tensor, path: Path, frames_per_second: int = 8) -> None:
    """Write pixels [F, 3, H, W] in the format of the suffix, atomically."""
    suffix, frames = path.suffix.lower(), to_uint8(pixels)
    if suffix not in {*IMAGE_FORMATS, ".gif", VIDEO_SUFFIX, FRAMES_SUFFIX}:
        raise ImageError(
            f"{path} cannot be written, because its file type is not supported; use a name that ends in "
            f"{WRITABLE_SUFFIXES} or {FRAMES_SUFFIX} [TM163]"
        )
    if frames_per_second < 1:
        raise ImageError(
            f"{path}: expected at least 1 frame per second, got {frames_per_second} frames per second; pass a higher "
            "rate [TM164]"
        )
    if suffix in IMAGE_FORMATS and suffix != ".png" and len(frames) > 1:
        raise ImageError(
            f"{path} cannot store {len(frames)} frames; use a name that ends in .png, .mp4 or .gif [TM165]"
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.partial")
    if suffix == FRAMES_SUFFIX:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        for number, frame in enumerate(frames):
            Image.fromarray(frame).save(partial / f"{number:05d}.png")
        shutil.rmtree(path, ignore_errors=True)
    elif suffix == VIDEO_SUFFIX:
        _import_video_io(path).write_video(frames, partial, frames_per_second)
    else:
        _save(frames, partial, "GIF" if suffix == ".gif" else IMAGE_FORMATS[suffix], frames_per_second)
    os.replace(partial, path)


def _save(frames: NDArray[np.uint8], file: Path | BytesIO, image_format: str, frames_per_second: int) -> None:
    first, *others = [Image.fromarray(frame) for frame in frames]
    if image_format != "GIF" and not others:
        return first.save(file, image_format)
    # Pillow merges equal consecutive frames of a PNG unless their blend modes differ, which opaque frames do not show.
    blend = {} if image_format == "GIF" else {"blend": [k % 2 for k in range(len(frames))]}
    duration = 1000 // frames_per_second
    return first.save(file, image_format, save_all=True, append_images=others, duration=duration, loop=0, **blend)


def video_suffix() -> Literal["mp4", "png"]:
    """The default format of videos: MP4, or PNG if PyAV is not installed."""
    return "mp4" if importlib.util.find_spec("av") else "png"


def check_video_format(video_format: str) -> None:
    """Refuse a format of videos that cannot be written here, before anything is generated."""
    if video_format == "mp4":
        _import_video_io(Path("--video-format mp4"))


def read_image(path: Path) -> Tensor:
    """The frames of an image or video in [0, 1], transparent parts over white: [F, 3, H, W]."""
    if path.is_dir():
        return _read_frames(path)
    if not path.is_file():
        raise ImageError(f"the image {path} does not exist; check the path [TM166]")
    if path.suffix.lower() not in {*IMAGE_FORMATS, ".gif", *VIDEO_SUFFIXES}:
        raise ImageError(f"{path} is not a supported image or video; expected one of {READABLE_SUFFIXES} [TM167]")
    if path.suffix.lower() in VIDEO_SUFFIXES:
        with image_errors(str(path), "a video"):
            frames = _import_video_io(path).read_video(path, partial(check_pixels, str(path)), max_pixels())
            return _as_floats(frames)
    with open_image(path, str(path)) as image:
        return _read_all(image)


def _as_floats(frames: list[NDArray[np.uint8]]) -> Tensor:
    """The pixels [F, 3, H, W] in [0, 1] of frames [H, W, 3], which are removed from the list one by one."""
    pixels = torch.empty(len(frames), 3, *frames[0].shape[:2])
    for k in reversed(range(len(pixels))):
        pixels[k].copy_(torch.from_numpy(frames.pop()).movedim(-1, 0)).div_(255)
    return pixels


def _read_all(image: Image.Image) -> Tensor:
    """The pixels [F, 3, H, W] in [0, 1] of an open image or animation. Each frame is decoded into its place."""
    height, width = _displayed_size(image)
    pixels = torch.empty(count_frames(image), 3, height, width)
    for frame, target in zip(_frames(image), pixels, strict=True):
        _write_rgb(frame, target)
    return pixels


def _read_frames(folder: Path) -> Tensor:
    """The frames of a folder, ordered by the numbers at the end of their names."""
    files = [
        file for file in folder.iterdir() if file.suffix.lower() in IMAGE_FORMATS and not file.name.startswith(".")
    ]
    numbers = {file: re.search(r"(\d+)$", file.stem) for file in files}
    unnumbered = next((file.name for file, number in numbers.items() if number is None), None)
    if not files or unnumbered:
        content = unnumbered or "no image"
        raise ImageError(
            f"{folder} is not a video folder, because it contains {content}; name the frames 00000.png, 00001.png "
            "and so on [TM168]"
        )
    order = {int(number[1]): file for file, number in numbers.items() if number}
    missing = sorted({*range(min(order), max(order) + 1)} - {*order})
    if missing or len(order) < len(files):
        problem = f"frame {missing[0]} is missing" if missing else "two frames have the same number"
        raise ImageError(
            f"{folder} is not a complete video: {problem}; number the frames from {min(order)} on without gaps [TM169]"
        )
    ordered = [order[number] for number in sorted(order)]
    _check_total(folder, ordered)
    pixels = torch.empty(0)
    for k, file in enumerate(ordered):
        frame = read_image(file)[0]
        pixels = pixels if k else torch.empty(len(ordered), *frame.shape)
        if frame.shape != pixels.shape[1:]:
            (height, width), (other_height, other_width) = pixels.shape[2:], frame.shape[1:]
            raise ImageError(
                f"{folder} has frames of {height}x{width} and {other_height}x{other_width} pixels; resize all frames "
                "to one size [TM170]"
            )
        pixels[k].copy_(frame)
    return pixels


def _check_total(folder: Path, files: Sequence[Path]) -> None:
    """Refuse frames that together would take too much memory, by their headers."""
    sizes = []
    for file in files:
        with open_image(file, str(file)) as image:
            sizes.append(image.size)
    width, height = max(sizes, key=math.prod)
    check_pixels(str(folder), width, height, len(files))


def image_size(path: Path) -> tuple[int, int]:
    """Height and width of an image as displayed, without decoding it; of a video, of its frames."""
    if path.suffix.lower() not in IMAGE_FORMATS or not path.is_file():
        height, width = read_image(path).shape[-2:]
        return height, width
    with open_image(path, str(path)) as image:
        return _displayed_size(image)


def _displayed_size(image: Image.Image) -> tuple[int, int]:
    rotated = image.getexif().get(ORIENTATION, 1) >= 5  # EXIF orientations 5 to 8 swap the sides
    return (image.width, image.height) if rotated else (image.height, image.width)


def resize_lanczos(pixels: Tensor, height: int, width: int) -> Tensor:
    """Resize pixels [F, 3, H, W] with a Lanczos filter."""
    if pixels.shape[-2:] == (height, width):
        return pixels
    frames = [Image.fromarray(frame).resize((width, height), Image.Resampling.LANCZOS) for frame in to_uint8(pixels)]
    return torch.stack([_rgb(frame) for frame in frames])


def resize_area(pixels: Tensor, height: int, width: int) -> Tensor:
    """Resize pixels [B, F, 3, H, W] on their device, bilinear with antialiasing."""
    if pixels.shape[-2:] == (height, width):
        return pixels
    flat = F.interpolate(pixels.flatten(0, 1).float(), (height, width), mode="bilinear", antialias=True)
    return flat.view(*pixels.shape[:3], height, width).clamp(0, 1)


def resize_and_center_crop(pixels: Tensor, height: int, width: int) -> Tensor:
    """Resize images [N, 3, H, W] so that they cover a size, and crop the center: [N, 3, height, width]."""
    scale = max(height / pixels.shape[2], width / pixels.shape[3])
    size = max(height, round(pixels.shape[2] * scale)), max(width, round(pixels.shape[3] * scale))
    if size != tuple(pixels.shape[2:]):
        pixels = F.interpolate(pixels, size, mode="bicubic", antialias=True).clamp(0, 1)
    top, left = (size[0] - height) // 2, (size[1] - width) // 2
    return pixels[..., top : top + height, left : left + width]


def decode_image(data: bytes, name: str, limit: int) -> Tensor:
    """The frames of an encoded image, animated PNG or GIF, with at most `limit` values: [F, 3, H, W] in [0, 1]."""
    with open_image(BytesIO(data), name) as image:
        if 3 * image.width * image.height * count_frames(image) > limit:
            raise ImageError(f"{name} decodes to more than {limit} values; send a smaller image [TM171]")
        return _read_all(image)


def encode_png(pixels: Tensor) -> bytes:
    """Encode pixels [F, 3, H, W] as a PNG, animated if there are several frames."""
    file = BytesIO()
    _save(to_uint8(pixels), file, "PNG", 8)
    return file.getvalue()


def encode_gif(pixels: Tensor, frames_per_second: int = 8) -> bytes:
    """Encode pixels [F, 3, H, W] as an animated GIF."""
    file = BytesIO()
    _save(to_uint8(pixels), file, "GIF", frames_per_second)
    return file.getvalue()


def max_pixels() -> int:
    """The most pixels an image may have; the frames of a video together may have `VIDEO_FACTOR` times as many."""
    text = os.environ.get(LIMIT_VARIABLE) or str(MAX_MEGAPIXELS)
    try:
        megapixels = float(text)
    except ValueError:
        megapixels = math.nan
    if not 0 < megapixels <= 1e6:
        raise ConfigError(
            f"{LIMIT_VARIABLE}: expected a number of megapixels above 0, got '{text:.40}'; set for example "
            f"{LIMIT_VARIABLE}={MAX_MEGAPIXELS} [TM1170]"
        )
    return int(megapixels * 1e6)


def check_pixels(name: str, width: int, height: int, frames: int = 1) -> None:
    """Refuse an image or video that would take too much memory: a few bytes of PNG can stand for gigabytes."""
    limit, pixels = max_pixels(), width * height * max(1, frames)
    allowed = limit if frames <= 1 else VIDEO_FACTOR * limit
    if width * height > limit or pixels > allowed:
        needed = math.ceil(max(width * height, pixels / (VIDEO_FACTOR if frames > 1 else 1)) / 1e6)
        of = f"{width}x{height} pixels" + (f" in {frames} frames" if frames > 1 else "")
        raise ImageError(
            f"{name} has {of}, {math.ceil(pixels / 1e6)} megapixels, more than the limit of {allowed / 1e6:g}; make "
            f"it smaller, or set {LIMIT_VARIABLE}={needed} in the environment if you trust the file [TM1171]"
        )


@contextmanager
def open_image(source: Path | BytesIO, name: str, min_size: int | None = None) -> Iterator[Image.Image]:
    """An image whose size, in its header, is within the limit; its pixels are decoded within the block.

    With `min_size`, a JPEG is decoded at the smallest scale that has so many pixels per side, and counts at that scale.
    Other formats than ours are not tried, because Pillow runs programs for some of them.
    """
    limit = max_pixels()
    with image_errors(name):
        with PILLOW_LIMIT:  # Pillow's own limit is a warning, which names neither the file nor what to do
            before, Image.MAX_IMAGE_PIXELS = Image.MAX_IMAGE_PIXELS, None
            try:
                image = Image.open(source, formats=READABLE_FORMATS)
            finally:
                Image.MAX_IMAGE_PIXELS = before if before is None else max(before, limit)
        with image:
            if min_size is not None:
                image.draft(None, (min_size, min_size))
            check_pixels(name, image.width, image.height, count_frames(image) if min_size is None else 1)
            yield image


def count_frames(image: Image.Image) -> int:
    """The frames of an animation; 1 for a JPEG, whose further images are previews of other sizes."""
    return int(getattr(image, "n_frames", 1)) if image.format in ANIMATED_FORMATS else 1


def _frames(image: Image.Image) -> Iterator[Image.Image]:
    size = image.size
    for number in range(count_frames(image)):
        image.seek(number)
        if image.size != size:  # a frame of a GIF may enlarge the image beyond the size in its header
            raise ValueError(
                f"frame {number} has {image.width}x{image.height} pixels, not {size[0]}x{size[1]} [TM1176]"
            )
        yield image


@contextmanager
def image_errors(name: str, kind: str = "an image") -> Iterator[None]:
    """Turn the exceptions of decoding a broken file into an ImageError that names it."""
    try:
        yield
    except (ImageError, ConfigError):
        raise
    except DECODING_ERRORS as error:
        raise ImageError(f"{name} cannot be read as {kind} ({error}); replace or remove this file [TM172]") from error


def pil_to_pixels(image: Image.Image) -> Tensor:
    """The pixels [1, 3, H, W] in [0, 1] of an image in memory, transparent parts over white."""
    return _rgb(image)[None]


def _rgb(image: Image.Image) -> Tensor:
    """One frame in [0, 1]: [3, H, W]."""
    pixels = torch.empty(3, *_displayed_size(image))
    _write_rgb(image, pixels)
    return pixels


def _write_rgb(image: Image.Image, target: Tensor) -> None:
    """Write one frame in [0, 1] to `target` [3, H, W], strip by strip."""
    if image.getexif().get(ORIENTATION, 1) != 1:
        image = ImageOps.exif_transpose(image)
    if image.size != (target.shape[2], target.shape[1]):
        raise ValueError(f"the frame has {image.width}x{image.height} pixels, and another size in the header [TM1178]")
    height = max(1, STRIP_PIXELS // image.width)
    image.load()
    for top in range(0, image.height, height):
        strip = image.crop((0, top, image.width, min(top + height, image.height)))
        target[:, top : top + height].copy_(_convert_rgb(strip))


def _convert_rgb(image: Image.Image) -> Tensor:
    """The pixels [3, H, W] in [0, 1] of an image that has been decoded."""
    if image.mode.startswith("I"):  # 16-bit grayscale, which Pillow's own conversion clips at 255
        return torch.from_numpy(np.array(image, np.float32) / 65535).expand(3, -1, -1)
    if image.mode in TRANSPARENT_MODES or "transparency" in image.info:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    return torch.from_numpy(np.array(image.convert("RGB"))).movedim(-1, 0) / 255


def _import_video_io(path: Path) -> Any:
    """Import the module that needs PyAV, which is an optional dependency."""
    try:
        from . import video_io
    except ImportError as error:
        raise ImageError(
            f"{path} needs PyAV ({error}); run `pip install 'tastemaker[video]'`, or use .gif [TM173]"
        ) from error
    return video_io


MIN_CELL_SIZE = 160  # pixels of the longer side of a sample in a grid
CAPTION_HEIGHT = 32  # pixels of two lines


def grid_upscale(height: int, width: int, min_size: int = MIN_CELL_SIZE) -> int:
    """The integer factor by which a grid enlarges its samples."""
    return max(1, math.ceil(min_size / max(height, width)))


def grid_boxes(count: int, height: int, width: int) -> list[tuple[int, int, int, int]]:
    """The boxes of the samples in a captioned grid: left, top, right and bottom."""
    columns, scale = math.ceil(math.sqrt(count)), grid_upscale(height, width)
    height, width = height * scale, width * scale
    corners = [(2 + i % columns * (width + 4), 2 + i // columns * (height + CAPTION_HEIGHT + 4)) for i in range(count)]
    return [(left, top, left + width, top + height) for left, top in corners]


def make_grid(
    pixels: Tensor,
    columns: int | None = None,
    captions: Sequence[str] = (),
    min_size: int = MIN_CELL_SIZE,
    notes: Sequence[str] = (),
) -> Tensor:
    """A grid of samples [B, F, 3, H, W], small ones enlarged to `min_size` pixels: [F, 3, H', W'].

    `captions` are at most two lines each, `notes` one more line each below them.
    """
    columns = columns or math.ceil(math.sqrt(len(pixels)))
    scale = grid_upscale(pixels.shape[-2], pixels.shape[-1], min_size)
    cells = pixels.detach().float().cpu().repeat_interleave(scale, -1).repeat_interleave(scale, -2)
    for texts, lines in ((captions, 2), (notes, 1)):
        if texts:
            labels = torch.stack([_draw_caption(text, cells.shape[-1], lines) for text in texts])  # [B, 3, h, W]
            cells = torch.cat([cells, labels[:, None].expand(-1, cells.shape[1], -1, -1, -1)], 3)
    cells = torch.nn.functional.pad(cells, (2, 2, 2, 2), value=1.0)
    rows = math.ceil(len(cells) / columns)
    blank = cells.new_ones(rows * columns - len(cells), *cells.shape[1:])
    grid = torch.cat([cells, blank]).view(rows, columns, *cells.shape[1:])  # [R, C, F, 3, h, w]
    return grid.permute(2, 3, 0, 4, 1, 5).flatten(4, 5).flatten(2, 3)


def make_contact_sheet(pixels: Tensor, captions: Sequence[str] = (), frames: int = 4) -> Tensor:
    """One image of samples [B, F, 3, H, W]; a video is a row of up to `frames` of its frames: [3, H', W']."""
    if pixels.shape[1] == 1:
        return make_grid(pixels, captions=captions)[0]
    count = min(frames, pixels.shape[1])
    picks = torch.linspace(0, pixels.shape[1] - 1, count).round().long()
    frame_captions = [caption if k == 0 else "" for caption in captions for k in range(count)]
    return make_grid(pixels[:, picks].flatten(0, 1)[:, None], columns=count, captions=frame_captions)[0]


def _draw_caption(caption: str, width: int, lines: int = 2, size: int = 12) -> Tensor:
    """Black text on white, wrapped and truncated to fit: [3, h, width]."""
    font = ImageFont.load_default(size)
    image = Image.new("RGB", (width, CAPTION_HEIGHT * lines // 2), "white")
    text = "\n".join(wrap_text(caption, width - 4, lines, font.getlength))
    ImageDraw.Draw(image).multiline_text((2, 1), text, "black", font, spacing=3)
    return torch.from_numpy(np.array(image)).movedim(-1, 0) / 255
