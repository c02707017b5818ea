"""Likes: images with prompts that somebody liked or disliked, each by itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Self

import torch

from ..core.randomness import Purpose, Randomness
from ..core.registry import ConfigError
from ..core.types import LikeBatch
from .dataset import ShuffledDataset, rank_range
from .image_io import read_image
from .image_transforms import center_square, check_image_size, stack_images
from .images import FORMATS, read_caption
from .text_files import MixtureRow, read_mixture, require_file


def check_like_ratio(ratio: float | None) -> None:
    """Refuse a share of likes that is not between 0 and 1."""
    if ratio is not None and not 0 <= ratio <= 1:
        raise ValueError(f"'like_ratio': expected a fraction from 0 to 1, got {ratio}; correct 'like_ratio' [TM1601]")


@dataclass(frozen=True)
class LikedImage:
    """An image on disk, with whether it is liked."""

    prompt: str
    file: Path
    liked: bool


@dataclass(frozen=True)
class LikeDataset(ShuffledDataset):
    """Labeled images on disk, decoded when they are needed."""

    prompts: tuple[str, ...]
    files: tuple[Path, ...]
    liked: tuple[bool, ...]
    image_size: int | None
    like_ratio: float | None  # share of likes in a batch; None: every image once per epoch
    seed: int

    @classmethod
    def from_images(
        cls, images: Sequence[LikedImage], image_size: int | None, like_ratio: float | None, seed: int
    ) -> Self:
        prompts, files, liked = (
            tuple(each.prompt for each in images),
            tuple(each.file for each in images),
            tuple(each.liked for each in images),
        )
        if like_ratio is not None and len(set(liked)) < 2:
            found = "likes" if liked[0] else "dislikes"
            raise ConfigError(
                f"data.like_ratio: {like_ratio} needs both likes and dislikes, but all {len(liked)} images are "
                f"{found}; remove data.like_ratio, or add images of the other kind [TM1602]"
            )
        return cls(prompts, files, liked, image_size, like_ratio, seed)

    def batch(self, step: int, batch_size: int, rank: int, world_size: int) -> LikeBatch:
        if self.like_ratio is None:
            batch: LikeBatch = super().batch(step, batch_size, rank, world_size)
            return batch
        positions = rank_range(step, batch_size, rank, world_size)
        rng = Randomness(self.seed, 0, torch.arange(positions.start, positions.stop))
        by_label = [[i for i, liked in enumerate(self.liked) if liked == label] for label in (False, True)]
        chosen = [
            by_label[coin < self.like_ratio][int(place * len(by_label[coin < self.like_ratio]))]
            for coin, place in rng.uniform(Purpose.LIKED, 2).tolist()
        ]
        return self.collate(chosen)

    def collate(self, indices: list[int]) -> LikeBatch:
        files = [self.files[i] for i in indices]
        pixels = stack_images(
            [center_square(read_image(file), self.image_size) for file in files], [str(file) for file in files]
        )
        liked = torch.tensor([self.liked[i] for i in indices])
        return LikeBatch(tuple(self.prompts[i] for i in indices), pixels, liked)


@dataclass(frozen=True)
class LikeFile:
    """Rows {prompt, image, label} of a .jsonl, a .json list, or a .yaml that mixes such files; `label` is a boolean."""

    path: Path
    image_dir: Path | None = None  # the folder of relative image paths; by default that of the file that names them
    like_ratio: float | None = None  # share of likes in a batch, such as 0.8; by default that of the data
    image_size: int | None = None  # pixels per side of the center square; by default images stay as they are
    batch_type: ClassVar[type] = LikeBatch

    def __post_init__(self) -> None:
        check_image_size(self.image_size)
        check_like_ratio(self.like_ratio)

    def load(self, seed: int) -> LikeDataset:
        images = [self._read(row) for row in read_mixture(self.path, seed)]
        return LikeDataset.from_images(images, self.image_size, self.like_ratio, seed)

    def _read(self, row: MixtureRow) -> LikedImage:
        file = require_file((self.image_dir or row.file.parent) / row.get_text("image"), row.location)
        label = row.row.get("label")
        if not isinstance(label, bool):
            raise ConfigError(
                f"{row.location}: 'label' is {label!r:.40}; expected true for a like and false for a dislike [TM1603]"
            )
        return LikedImage(row.get_text("prompt"), file, label)


@dataclass(frozen=True)
class LikeFolder:
    """Images in the folders `liked` and `disliked`, each with its prompt in a .txt of the same name beside it."""

    path: Path
    like_ratio: float | None = None  # share of likes in a batch, such as 0.8; by default that of the data
    image_size: int | None = None  # pixels per side of the center square; by default images stay as they are
    batch_type: ClassVar[type] = LikeBatch

    def __post_init__(self) -> None:
        check_image_size(self.image_size)
        check_like_ratio(self.like_ratio)

    def load(self, seed: int) -> LikeDataset:
        images = [
            LikedImage(read_caption(file.with_suffix(".txt"), f"the prompt of {file}"), file, liked)
            for folder, liked in (("liked", True), ("disliked", False))
            for file in self._list_images(self.path / folder)
        ]
        if not images:
            raise ConfigError(
                f"{self.path}: expected images in the folders liked and disliked, found none; add files that end in "
                f"{', '.join(FORMATS)}, or correct data.path [TM1604]"
            )
        return LikeDataset.from_images(images, self.image_size, self.like_ratio, seed)

    def _list_images(self, folder: Path) -> list[Path]:
        if not folder.is_dir():
            return []
        return [file for file in sorted(folder.iterdir()) if file.suffix.lower() in FORMATS]
