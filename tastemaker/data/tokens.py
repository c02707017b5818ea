"""Precomputed tokens of images: folders of .npy files, as LlamaGen and `tastemaker encode` write them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field, NonNegativeInt
from torch import Tensor

from ..core.array_files import read_array
from ..core.randomness import Purpose, Randomness
from ..core.registry import ConfigError
from ..core.types import TokenBatch
from .class_labels import make_class_labels
from .image_sources import READ_ERRORS, require_directory
from .images import ClassCaptionSource, SkippedSamples
from .prefetch import BatchShard, PrefetchedDataset

CODES, LABELS = "codes", "labels"  # how the names of the two folders end
TIGHT_CROP_SUFFIX = "_105"  # LlamaGen's second folder of the same images, cropped with --crop-range 1.05


@dataclass(frozen=True)
class TokenDataset(PrefetchedDataset):
    """Token files with one random view each; files that cannot be read are skipped."""

    folders: tuple[tuple[Path, Path], ...]  # of codes and of labels; one pair is chosen at random per sample
    numbers: tuple[int, ...]  # the names of the files
    prompts: tuple[str, ...]  # by class id
    seed: int
    skipped: SkippedSamples

    def __len__(self) -> int:
        return len(self.numbers)

    def load_shard(self, shard: BatchShard) -> TokenBatch:
        draws = Randomness(self.seed, shard.step, shard.rows).uniform(Purpose.VIEW, 2)
        indices = shard.indices(len(self), self.seed)
        samples = [self._load_readable(index, *draw) for index, draw in zip(indices, draws.tolist(), strict=True)]
        lengths = {len(ids) for _, ids in samples}
        if len(lengths) > 1:
            raise ConfigError(
                f"data.path: the files have different numbers of tokens ({', '.join(map(str, sorted(lengths)))}); "
                "encode all images at one size [TM241]"
            )
        return TokenBatch(tuple(prompt for prompt, _ in samples), torch.stack([ids for _, ids in samples]))

    def _load_readable(self, index: int, folder_draw: float, view_draw: float) -> tuple[str, Tensor]:
        codes, labels = self.folders[int(folder_draw * len(self.folders))]
        for offset in range(len(self)):
            position = (index + offset) % len(self)
            if position in self.skipped:
                continue
            file = f"{self.numbers[position]}.npy"
            try:
                views, label = read_npy(codes / file), read_npy(labels / file)
                views = views.reshape(-1, views.shape[-1])
                ids = torch.from_numpy(views[int(view_draw * len(views))].astype("<i8"))
                class_id = int(label.reshape(-1)[0])
                if not 0 <= class_id < len(self.prompts):
                    raise ValueError(
                        f"the class id is {class_id}, but there are only {len(self.prompts)} classes [TM242]"
                    )
                return self.prompts[class_id], ids
            except READ_ERRORS as error:
                self.skipped.add(position, str(codes / file), error)
        raise ConfigError(
            f"data.path: none of the {len(self)} files in {codes} can be read; encode the images again with "
            "`tastemaker encode` [TM243]"
        )


@dataclass(frozen=True)
class TokenFolder:
    """Tokens in `<name>_codes/<number>.npy`, [1, views, tokens], and classes in `<name>_labels/<number>.npy`."""

    path: Path  # the folder that holds both; with a sibling of the same name and _105, samples come from either
    num_classes: Annotated[int, Field(ge=1, le=10**6)] = 1000
    class_names: tuple[str, ...] = ()  # by class id; by default ImageNet's, if there are 1000 classes
    caption_source: ClassCaptionSource = "class_name"  # class_id for models that take class ids
    max_skipped: NonNegativeInt = 0  # unreadable files that are skipped on each rank; one more is an error
    batch_type: ClassVar[type] = TokenBatch

    def __post_init__(self) -> None:
        make_class_labels(self.num_classes, self.class_names)

    def load(self, seed: int) -> TokenDataset:
        labels, by_name = make_class_labels(self.num_classes, self.class_names), self.caption_source == "class_name"
        prompts = tuple(labels.name(i) if by_name else str(i) for i in range(self.num_classes))
        sibling = self.path.with_name(self.path.name + TIGHT_CROP_SUFFIX)
        folders = tuple(map(code_and_label_folders, [self.path, sibling] if sibling.is_dir() else [self.path]))
        numbers = tuple(sorted(int(file.stem) for file in folders[0][0].glob("*.npy") if file.stem.isdecimal()))
        if not numbers:
            raise ConfigError(
                f"data.path: {folders[0][0]} does not contain files such as 0.npy; write tokens with `tastemaker "
                "encode` [TM244]"
            )
        return TokenDataset(folders, numbers, prompts, seed, SkippedSamples(self.max_skipped))


def code_and_label_folders(path: Path) -> tuple[Path, Path]:
    """The folder of codes and the folder of labels below a path."""
    require_directory(path)
    codes, labels = (sorted(folder for folder in path.glob(f"*{end}") if folder.is_dir()) for end in (CODES, LABELS))
    if [len(codes), len(labels)] != [1, 1]:
        raise ConfigError(
            f"data.path: {path} holds {len(codes)} folders of codes and {len(labels)} of labels; expected one of "
            f"each, such as imagenet256_{CODES} and imagenet256_{LABELS} [TM245]"
        )
    return codes[0], labels[0]


def read_npy(path: Path) -> NDArray[np.int64]:
    """The non-negative integers of a file, without unpickling."""
    values: NDArray[np.int64] = read_array(path)
    if not np.issubdtype(values.dtype, np.integer) or not values.size or values.min() < 0:
        raise ValueError(f"expected integers of at least 0, got {values.dtype} of shape {list(values.shape)} [TM246]")
    return values
