"""Captioned pictures and clips to learn from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from ..core.randomness import Randomness
from ..core.registry import ConfigError
from ..core.toy_colors import TOY_COLORS
from ..core.types import ImageBatch, PromptBatch
from ..models.toy import SIDE
from .image_io import IMAGE_FORMATS, VIDEO_SUFFIXES, read_image
from .prefetch import BatchShard, Prefetcher, whole_batch_prefetcher
from .prompts import check_exists
from .sampler import batch_indices
from .text_files import read_json_rows, read_lines, text_field

EXAMPLES = Path(__file__).parent.parent / "recipes" / "data" / "edits"  # of classes that ImageNet has
FORMATS = (*IMAGE_FORMATS, ".gif", *VIDEO_SUFFIXES)


@dataclass(frozen=True)
class SolidColorImages:
    """Plain pictures of colours, each a little off the colour's own shade: what the toys learn from."""

    colors: tuple[str, ...]
    frames: int
    spread: float  # standard deviation of a picture's shade

    def __post_init__(self) -> None:
        unknown = [color for color in self.colors if color not in TOY_COLORS]
        if unknown or not self.colors:
            found = f"{unknown[0]!r:.60}" if unknown else "none"
            raise ValueError(f"'colors' names {found}; expected some of {', '.join(TOY_COLORS)}")
        if not 1 <= self.frames <= 1000 or not 0 <= self.spread <= 1:
            found = f"frames {self.frames}, spread {self.spread}"
            raise ValueError(f"found {found}; expected 1 to 1000 frames and a spread from 0 to 1")

    def color(self, number: int, further: int = 0) -> str:
        return self.colors[(number + further) % len(self.colors)]

    def pictures(self, numbers: Sequence[int], colors: Sequence[str], purpose: str = "picture") -> Tensor:
        """Always the same for a number: [B, F, 3, 8, 8] in [0, 1]."""
        shades = Randomness(0, 0, torch.tensor(numbers, dtype=torch.int64)).normal(purpose, 3) * self.spread
        plain = (torch.tensor([TOY_COLORS[color] for color in colors]).view(-1, 3) + shades).clamp(0, 1)
        return plain[:, None, :, None, None].repeat(1, self.frames, 1, SIDE, SIDE)


@dataclass(frozen=True)
class ToyImageDataset:
    plain: SolidColorImages
    first_number: int
    count: int
    seed: int

    def __len__(self) -> int:
        return self.count

    def batch(self, step: int, size: int, rank: int, world: int) -> ImageBatch:
        numbers = [self.first_number + row for row in batch_indices(len(self), self.seed, step, size, rank, world)]
        colors = [self.plain.color(number) for number in numbers]
        return ImageBatch(tuple(f"a {color}" for color in colors), self.plain.pictures(numbers, colors))

    def first(self, count: int) -> PromptBatch:
        return PromptBatch(tuple(f"a {self.plain.color(i)}" for i in range(count)), ({},) * count)


@dataclass(frozen=True)
class ToyPictures:
    """Plain pictures with their colour as caption; those from another `start` on are held out."""

    colors: tuple[str, ...] = ("red", "green", "blue", "grey")
    frames: int = 1
    count: int = 256
    start: int = 0
    spread: float = 0.05
    yields: ClassVar[type] = ImageBatch

    def __post_init__(self) -> None:
        SolidColorImages(self.colors, self.frames, self.spread)
        check_count(self.count, self.start)

    def load(self, seed: int) -> ToyImageDataset:
        return ToyImageDataset(SolidColorImages(self.colors, self.frames, self.spread), self.start, self.count, seed)


def check_count(count: int, start: int) -> None:
    """Refuse a number of rows that there cannot be."""
    if not 1 <= count <= 10**6 or not 0 <= start < 2**31:
        raise ValueError(
            f"found count {count} and start {start}; expected a count from 1 to 1000000, start of at least 0"
        )


@dataclass(frozen=True)
class ImageFolderDataset:
    """Pictures on disk, decoded when their turn comes."""

    files: tuple[Path, ...]
    prompts: tuple[str, ...]
    size: int | None
    seed: int

    def __len__(self) -> int:
        return len(self.files)

    @cached_property
    def ahead(self) -> Prefetcher[ImageBatch, ImageBatch]:
        return whole_batch_prefetcher(self._made, steps=1)  # clips are large

    def batch(self, step: int, size: int, rank: int, world: int) -> ImageBatch:
        return self.ahead.take(BatchShard(step, size, rank, world))

    def _made(self, share: BatchShard) -> ImageBatch:
        chosen = batch_indices(len(self), self.seed, share.step, share.size, share.rank, share.world)
        pictures = [center_square(read_image(self.files[i]), self.size) for i in chosen]
        return ImageBatch(
            tuple(self.prompts[i] for i in chosen), stack_images(pictures, [str(self.files[i]) for i in chosen])
        )

    def first(self, count: int) -> PromptBatch:
        return PromptBatch(tuple(self.prompts[i % len(self)] for i in range(count)), ({},) * count)


@dataclass(frozen=True)
class PictureFolder:
    """Pictures in a folder, each with its caption in a .txt beside it, or all in a metadata.jsonl."""

    path: Path | None = None  # a few small pictures of classes to try a recipe with, if not given
    size: int | None = None  # pixels a side, cut from the middle; as they are if not given
    yields: ClassVar[type] = ImageBatch

    def __post_init__(self) -> None:
        check_size(self.size)

    def load(self, seed: int) -> ImageFolderDataset:
        folder = self.path or EXAMPLES
        listed = folder / "metadata.jsonl"
        captions = self._listed(listed) if listed.is_file() else self._beside(folder)
        if not captions:
            raise ConfigError(f"{folder}: there are no pictures; expected files that end in {', '.join(FORMATS)}")
        return ImageFolderDataset(tuple(captions), tuple(captions.values()), self.size, seed)

    def _listed(self, listed: Path) -> dict[Path, str]:
        captions = {}
        for number, row in read_json_rows(listed):
            file = listed.parent / text_field(listed, number, row, "file_name")
            captions[check_exists(file, f"{listed}, line {number}")] = text_field(listed, number, row, "prompt")
        return captions

    def _beside(self, folder: Path) -> dict[Path, str]:
        if not folder.is_dir():
            raise ConfigError(f"{folder}: there is no such folder; check the path")
        files = sorted(file for file in folder.iterdir() if file.suffix.lower() in FORMATS)
        captions = [check_exists(file.with_suffix(".txt"), f"the caption of {file}") for file in files]
        texts = [" ".join(line for _, line in read_lines(caption)) for caption in captions]
        return dict(zip(files, texts, strict=True))


def check_size(size: int | None) -> None:
    """Refuse a size no picture can have."""
    if size is not None and not 1 <= size <= 16384:
        raise ValueError(f"'size' is {size}; expected 1 to 16384 pixels a side")


def center_square(pixels: Tensor, size: int | None) -> Tensor:
    """The middle square of [F, 3, H, W], `size` pixels a side."""
    if size is None:
        return pixels
    height, width = pixels.shape[-2:]
    side = min(height, width)
    top, left = (height - side) // 2, (width - side) // 2
    middle = pixels[..., top : top + side, left : left + side]
    return middle if side == size else F.interpolate(middle, (size, size), mode="bilinear", antialias=True).clamp(0, 1)


def stack_images(pictures: Sequence[Tensor], names: Sequence[str]) -> Tensor:
    """Pictures of one shape in one tensor: [B, F, 3, H, W]."""
    for picture, name in zip(pictures, names, strict=True):
        if picture.shape != pictures[0].shape:
            (f, _, h, w), (frames, _, height, width) = picture.shape, pictures[0].shape
            raise ConfigError(
                f"{name} has {f} frames of {w}x{h} pixels, but {names[0]} has {frames} of {width}x{height}; "
                "set data.size, or make them alike"
            )
    return torch.stack(list(pictures))
