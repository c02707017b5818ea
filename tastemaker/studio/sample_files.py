"""Samples of runs as small images: cut out of the grids that runs write, kept in a bounded cache."""

from __future__ import annotations

import io
import os
import re
import threading
from collections import OrderedDict
from dataclasses import dataclass, field
from pathlib import Path

from PIL import Image, ImageSequence, UnidentifiedImageError
from starlette.exceptions import HTTPException

from ..report.run_record import SampleGrid, read_sample_grid
from .access import resolve_inside

MAX_GRIDS = 1000  # of a run, the newest
MAX_CACHE_BYTES = 48 * 2**20
MAX_GRID_PIXELS = 64 * 2**20  # larger grids are not decoded
THUMBNAIL_SIDE, MOSAIC_SIDE = 256, 176  # pixels
LOSSLESS_SIDE = 160  # smaller images are PNG
VIDEO_SUFFIXES = (".mp4", ".webm")
MAX_FRAMES = 240
GRID_NAME = re.compile(r"step-(\d{1,12})\.json")


@dataclass(frozen=True)
class GridFile:
    """A grid of samples with a number that changes when it is written again."""

    grid: SampleGrid
    version: int

    @property
    def is_video_file(self) -> bool:
        """Whether a browser has to play the grid itself, because it is not an animated image."""
        return self.grid.path.suffix.lower() in VIDEO_SUFFIXES


@dataclass
class SampleFolder:
    """The grids of one run by step, which follow its folder `samples`."""

    directory: Path
    grids: dict[int, GridFile] = field(default_factory=dict)
    _stamps: dict[int, tuple[int, int]] = field(default_factory=dict)

    def update(self) -> list[int]:
        """Read new and rewritten grids. Returns their steps; a grid that is still being written is read next time."""
        stamps = self._read_stamps()
        for step in self._stamps.keys() - stamps.keys():
            del self._stamps[step]
            self.grids.pop(step, None)
        changed = []
        for step, stamp in sorted(stamps.items()):
            if self._stamps.get(step) == stamp:
                continue
            grid = read_sample_grid(self.directory / "samples" / f"step-{step:06d}.json")
            if grid is not None and grid.step == step and self._is_inside(grid.path):
                self._stamps[step], self.grids[step] = stamp, GridFile(grid, stamp[0] // 1_000_000)
                changed.append(step)
        return changed

    def _read_stamps(self) -> dict[int, tuple[int, int]]:
        try:
            with os.scandir(self.directory / "samples") as entries:
                found = {int(match[1]): entry for entry in entries if (match := GRID_NAME.fullmatch(entry.name))}
            infos = {step: found[step].stat() for step in sorted(found)[-MAX_GRIDS:]}
        except OSError:
            return {}
        return {step: (info.st_mtime_ns, info.st_size) for step, info in infos.items()}

    def _is_inside(self, path: Path) -> bool:
        try:
            resolve_inside(self.directory, str(path.relative_to(self.directory)))
        except HTTPException:
            return False
        return True


@dataclass(frozen=True)
class EncodedImage:
    """An image as a browser gets it."""

    content: bytes
    media_type: str


class ImageCache:
    """Encoded images by key, the ones used last, within a number of bytes."""

    def __init__(self, max_bytes: int = MAX_CACHE_BYTES) -> None:
        self.max_bytes, self.num_bytes = max_bytes, 0
        self._images: OrderedDict[object, EncodedImage] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: object) -> EncodedImage | None:
        with self._lock:
            image = self._images.get(key)
            if image is not None:
                self._images.move_to_end(key)
            return image

    def put(self, key: object, image: EncodedImage) -> None:
        with self._lock:
            previous = self._images.pop(key, None)
            self.num_bytes += len(image.content) - (len(previous.content) if previous else 0)
            self._images[key] = image
            while self.num_bytes > self.max_bytes and len(self._images) > 1:
                self.num_bytes -= len(self._images.popitem(last=False)[1].content)


class SampleCutter:
    """Cuts samples out of grids. All thumbnails of a grid are cut at once, because decoding the grid is what costs."""

    def __init__(self) -> None:
        self.cache = ImageCache()
        self._decoding = threading.Lock()  # one grid at a time, so that memory stays bounded

    def thumbnail(self, file: GridFile, index: int) -> EncodedImage:
        """Return a sample as a small image; of a video, its first frame."""
        check_index(file, index)
        key = (file.grid.path, file.version)
        if (image := self.cache.get((*key, index))) is not None:
            return image
        with self._decoding:
            if (image := self.cache.get((*key, index))) is not None:
                return image
            with decode_first_frame(file.grid.path) as frame:
                cells = [shrink(frame.crop(box), THUMBNAIL_SIDE) for box in file.grid.boxes]
            images = [encode(cell) for cell in cells]
            for number, image in enumerate(images):
                self.cache.put((*key, number), image)
            return images[index]

    def mosaic(self, file: GridFile) -> EncodedImage:
        """Return the first samples of a grid in a square, for the list of runs."""
        check_index(file, 0)
        key = (file.grid.path, file.version, "mosaic")
        if (image := self.cache.get(key)) is None:
            with self._decoding, decode_first_frame(file.grid.path) as frame:
                image = encode(make_mosaic([frame.crop(box) for box in file.grid.boxes[:4]]))
            self.cache.put(key, image)
        return image

    def source(self, file: GridFile, index: int) -> EncodedImage:
        """Return the images that a sample's prompt is about, side by side, as a small image."""
        check_index(file, index)
        if not file.grid.source_boxes:
            raise HTTPException(404, "the prompts of this grid have no source images [TM2360]")
        key = (file.grid.path, file.version, index, "source")
        if (image := self.cache.get(key)) is None:
            boxes = file.grid.source_boxes[index]
            with self._decoding, decode_first_frame(file.grid.path) as frame:
                strip = frame.crop((boxes[0][0], boxes[0][1], boxes[-1][2], boxes[-1][3]))
            image = encode(shrink(strip, THUMBNAIL_SIDE))
            self.cache.put(key, image)
        return image

    def full(self, file: GridFile, index: int) -> EncodedImage:
        """Return a sample in full size, without loss; an animated image stays animated."""
        check_index(file, index)
        key = (file.grid.path, file.version, index, "full")
        if (image := self.cache.get(key)) is not None:
            return image
        box = file.grid.boxes[index]
        with self._decoding:
            if file.is_video_file:
                with decode_first_frame(file.grid.path) as frame:
                    image = encode(frame.crop(box), lossless=True)
            else:
                image = cut_animation(file.grid.path, box)
        self.cache.put(key, image)
        return image


def check_index(file: GridFile, index: int) -> None:
    if not 0 <= index < len(file.grid.boxes):
        raise HTTPException(404, f"this grid has {len(file.grid.boxes)} samples, and no sample {index} [TM1369]")


def decode_first_frame(path: Path) -> Image.Image:
    """Decode an image, or the first frame of an animation or video."""
    try:
        if path.suffix.lower() in VIDEO_SUFFIXES:
            from ..data import video_io  # needs PyAV, an optional dependency

            return Image.fromarray(video_io.read_first_frame(path, MAX_GRID_PIXELS))
        with Image.open(path) as image:
            check_size(image)
            return image.convert("RGB")
    except (OSError, ValueError, ImportError, UnidentifiedImageError, Image.DecompressionBombError) as error:
        raise HTTPException(404, f"the samples cannot be read ({type(error).__name__}) [TM1370]") from error


def check_size(image: Image.Image) -> None:
    if image.width * image.height > MAX_GRID_PIXELS:
        raise HTTPException(413, f"the samples have {image.width} x {image.height} pixels, too many to show [TM1371]")


def cut_animation(path: Path, box: tuple[int, int, int, int]) -> EncodedImage:
    """Cut a box out of all frames of an image file: PNG, animated if the file is."""
    try:
        with Image.open(path) as image:
            check_size(image)
            duration = image.info.get("duration", 125)
            frames = []
            for number, frame in enumerate(ImageSequence.Iterator(image)):
                if number >= MAX_FRAMES:
                    break
                frames.append(frame.convert("RGB").crop(box))
    except (OSError, ValueError, UnidentifiedImageError, Image.DecompressionBombError) as error:
        raise HTTPException(404, f"the samples cannot be read ({type(error).__name__}) [TM1372]") from error
    if len(frames) == 1:
        return encode(frames[0], lossless=True)
    buffer = io.BytesIO()
    frames[0].save(buffer, "PNG", save_all=True, append_images=frames[1:], duration=duration, loop=0)
    return EncodedImage(buffer.getvalue(), "image/png")


def shrink(image: Image.Image, side: int) -> Image.Image:
    if max(image.size) > side:
        image = image.copy()
        image.thumbnail((side, side), Image.Resampling.LANCZOS)
    return image


def make_mosaic(cells: list[Image.Image]) -> Image.Image:
    """Place the first four samples in a square, or the first one if there are fewer."""
    per_side = 2 if len(cells) >= 4 else 1
    side = MOSAIC_SIDE // per_side
    mosaic = Image.new("RGB", (MOSAIC_SIDE, MOSAIC_SIDE))
    for number, cell in enumerate(cells[: per_side**2]):
        ratio = side / min(cell.size)
        size = (max(side, round(cell.width * ratio)), max(side, round(cell.height * ratio)))
        scaled = cell.resize(size, Image.Resampling.LANCZOS).crop((0, 0, side, side))
        mosaic.paste(scaled, (number % per_side * side, number // per_side * side))
    return mosaic


def encode(image: Image.Image, *, lossless: bool = False) -> EncodedImage:
    """Encode as PNG if the image is small or must not lose anything, otherwise as WebP."""
    buffer = io.BytesIO()
    if lossless or max(image.size) <= LOSSLESS_SIDE:
        image.save(buffer, "PNG")
        return EncodedImage(buffer.getvalue(), "image/png")
    image.save(buffer, "WEBP", quality=88)
    return EncodedImage(buffer.getvalue(), "image/webp")
