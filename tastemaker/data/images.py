"""Images with captions or class names: from folders, tar shards and saved data sets, cropped to squares."""

from __future__ import annotations

import warnings
from abc import abstractmethod
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Annotated, ClassVar, Literal

import numpy as np
import torch
from pydantic import Field, NonNegativeInt
from torch import Tensor

from ..core.randomness import Purpose, Randomness
from ..core.registry import ConfigError
from ..core.types import ImageBatch, PromptBatch
from .class_labels import are_imagenet_names, imagenet_labels, wordnet_class_ids
from .dataset import epoch_permutation, repeat_prompts
from .hf_datasets import is_saved_dataset, load_images
from .image_io import IMAGE_FORMATS, VIDEO_SUFFIXES, read_image
from .image_sources import (
    METADATA_FILE,
    READ_ERRORS,
    ImageSource,
    is_tar_path,
    open_class_folder,
    open_image_folder,
    open_tar_shards,
    read_metadata_captions,
    require_directory,
)
from .image_transforms import center_crop, center_square, check_image_size, decode_square, random_crop, stack_images
from .prefetch import BatchShard, PrefetchedDataset, Prefetcher
from .text_files import read_lines, require_file

ClassCaptionSource = Literal["class_name", "class_id"]
ImageCaptionSource = Literal["caption", "class_name", "class_id", "empty"]
Crop = Literal["center", "random"]
MAX_CACHED_BYTES = 4 * 2**30  # of center crops, which are decoded once
CHUNK = 8  # images that a thread loads per job
NUM_WORKERS = 4
PROBED_LABELS = 64  # to show class ids where classes have no names
EXAMPLES = Path(__file__).parent.parent / "recipes" / "base" / "data" / "edits"  # images of ImageNet classes
FORMATS = (*IMAGE_FORMATS, ".gif", *VIDEO_SUFFIXES)


@dataclass
class SkippedSamples:
    """Samples that cannot be read: each is reported once, and one more than `limit` is an error."""

    limit: int
    names: dict[int, str] = field(default_factory=dict)  # by index

    def __contains__(self, index: int) -> bool:
        return index in self.names

    def add(self, index: int, name: str, error: Exception) -> None:
        if index in self.names:  # another thread was first
            return
        self.names[index] = name
        count, reason = len(self.names), " ".join(str(error).split()) or type(error).__name__
        if count > self.limit:
            before = f", and {count - 1} samples before it were skipped" if count > 1 else ""
            raise ConfigError(
                f"data: {name} cannot be used ({reason:.200}){before}; repair the file, or set data.max_skipped "
                f"above {self.limit} [TM191]"
            ) from error
        warnings.warn(
            f"data: {name} is skipped ({reason:.200}); {count} of {self.limit} allowed by data.max_skipped [TM192]",
            stacklevel=2,
        )


@dataclass(frozen=True)
class CroppedImage:
    """A square of an image with its prompt."""

    prompt: str
    pixels: Tensor  # [3, S, S] uint8, or float in [0, 1]
    image_id: int


@dataclass(frozen=True)
class CroppedImageDataset(PrefetchedDataset):
    """Squares of a source's images, loaded by threads; an image that cannot be read is replaced by the next one."""

    source: ImageSource
    indices: Tensor  # [N] into the source
    prompts: tuple[str, ...]  # by class id; empty if classes have no names
    skipped: SkippedSamples
    num_workers: int
    seed: int

    def __len__(self) -> int:
        return len(self.indices)

    @abstractmethod
    def crop(self, index: int, draws: Sequence[float]) -> CroppedImage:
        """The square of a source's image; four uniform draws decide on scale, place and flip."""

    @abstractmethod
    def collate(self, images: Sequence[CroppedImage]) -> ImageBatch: ...

    @cached_property
    def prefetcher(self) -> Prefetcher[list[CroppedImage], ImageBatch]:
        return Prefetcher(
            self._jobs, lambda chunks: self.collate([image for chunk in chunks for image in chunk]), self.num_workers
        )

    def load_shard(self, shard: BatchShard) -> ImageBatch:
        return self.collate([image for job in self._jobs(shard) for image in job()])

    def _jobs(self, shard: BatchShard) -> list[Callable[[], list[CroppedImage]]]:
        draws = Randomness(self.seed, shard.step, shard.rows).uniform(Purpose.CROP, 4)
        samples = list(zip(shard.indices(len(self), self.seed), draws.tolist(), strict=True))
        chunks = [samples[i : i + CHUNK] for i in range(0, len(samples), CHUNK)]
        return [partial(lambda chunk: [self._load_readable(*sample) for sample in chunk], chunk) for chunk in chunks]

    def _load_readable(self, position: int, draws: Sequence[float]) -> CroppedImage:
        for offset in range(len(self)):
            index = int(self.indices[(position + offset) % len(self)])
            if index in self.skipped:
                continue
            try:
                return self.crop(index, draws)
            except READ_ERRORS as error:
                self.skipped.add(index, self.source.name(index), error)
        raise ConfigError(f"data: none of the {len(self)} images can be read; check that the files are images [TM193]")

    def class_prompt(self, label: int) -> str:
        if self.prompts and label >= len(self.prompts):
            raise ValueError(f"the class id is {label}, but there are only {len(self.prompts)} classes [TM194]")
        return self.prompts[label] if self.prompts else str(label)


@dataclass(frozen=True)
class ImageCollectionDataset(CroppedImageDataset):
    """Images decoded straight to squares; center crops are kept in memory as far as they fit."""

    spec: ImageCollection
    caption_source: ImageCaptionSource

    @cached_property
    def cache(self) -> dict[int, Tensor]:
        """Center crops by index: [3, S, S] uint8."""
        return {}

    def crop(self, index: int, draws: Sequence[float]) -> CroppedImage:
        pixels = self.cache[index] if index in self.cache else self._decode(index, draws)
        flipped = self.spec.random_flip and draws[3] < 0.5
        image_id = 2 * index + flipped if self.spec.random_flip else index
        return CroppedImage(self.prompt(index), pixels.flip(-1) if flipped else pixels, image_id)

    def _decode(self, index: int, draws: Sequence[float]) -> Tensor:
        spec, source = self.spec, self.source
        crop_draws = draws[:3] if spec.crop == "random" else ()
        encoded, name = source.encoded(index), source.name(index)
        square = decode_square(encoded, name, spec.image_size, crop_draws, grayscale=spec.grayscale)
        # numpy takes a third of torch's time to make it contiguous
        pixels = torch.from_numpy(np.ascontiguousarray(square.numpy().transpose(2, 0, 1)))
        if spec.crop == "center" and (len(self.cache) + 1) * pixels.nbytes <= MAX_CACHED_BYTES:
            self.cache[index] = pixels
        return pixels

    def collate(self, images: Sequence[CroppedImage]) -> ImageBatch:
        pixels = torch.empty(len(images), 1, 3, self.spec.image_size, self.spec.image_size)
        for row, image in zip(pixels, images, strict=True):
            torch.div(image.pixels, 255, out=row[0])  # ten times as fast as to stack, convert and divide
        image_ids = torch.tensor([image.image_id for image in images]) if self.spec.crop == "center" else None
        return ImageBatch(tuple(image.prompt for image in images), pixels, image_ids)

    def prompt(self, index: int) -> str:
        if self.caption_source == "empty":
            return ""
        if self.caption_source == "caption":
            return self.source.caption(index)
        return self.class_prompt(self.source.label(index))

    def first_prompts(self, count: int) -> PromptBatch:
        prompts = list(self.prompts)
        for index in self.indices.tolist() if not prompts else ():
            with suppress(*READ_ERRORS):  # reported when the image is loaded
                prompts.append(self.prompt(index))
            if len(prompts) == count or self.caption_source == "empty":
                break
        return repeat_prompts(prompts or [""], count)

    def split(self, held_out: int, seed: int) -> tuple[ImageCollectionDataset, ImageCollectionDataset]:
        """A training set, and a validation set of center crops."""
        order = self.indices[epoch_permutation(len(self), self.seed, 0)]
        validation = replace(self.spec, crop="center", random_flip=False)
        return (
            replace(self, indices=order[held_out:], seed=seed),
            replace(self, indices=order[:held_out], seed=seed, spec=validation),
        )


@dataclass(frozen=True)
class ImageCollection:
    """Images in folders at any depth, in tar shards, or saved by `datasets`, cropped to squares."""

    path: Path  # of CelebAMask-HQ, only the images are read
    image_size: Annotated[int, Field(ge=1, le=16384)] = 256  # pixels per side
    file_pattern: str = "*"  # file names, or names of shards, such as train-*.tar
    split: str = "train"  # of a data set saved by `datasets`
    caption_source: ImageCaptionSource | None = None  # the prompt of an image; by default its caption, else empty
    crop: Crop = "center"  # random: 80 % to all of the shorter side, anywhere
    random_flip: bool = False  # mirror images with probability 0.5
    grayscale: bool = False  # converts images to grayscale, in three equal channels
    max_skipped: NonNegativeInt = 0  # unreadable images that are skipped on each rank; one more is an error
    num_workers: Annotated[int, Field(ge=0, le=256)] = NUM_WORKERS  # threads per rank that load images in advance
    batch_type: ClassVar[type] = ImageBatch

    def class_prompts(self) -> tuple[str, ...]:
        return read_class_prompts(self.path, self.split, self.caption_source)

    def load(self, seed: int) -> ImageCollectionDataset:
        source = open_image_source(self.path, self.file_pattern, self.split)
        caption_source = self.caption_source or ("caption" if source.captioned else "empty")
        prompts = class_captions(source.class_names, caption_source)
        return ImageCollectionDataset(
            source,
            torch.arange(len(source)),
            prompts,
            SkippedSamples(self.max_skipped),
            self.num_workers,
            seed,
            self,
            caption_source,
        )


def read_class_prompts(path: Path, split: str, caption_source: ImageCaptionSource | None) -> tuple[str, ...]:
    """The prompt of each class of a data set saved by `datasets`, if prompts are names that its features define."""
    if caption_source != "class_name" or not is_saved_dataset(path):
        return ()
    return class_captions(load_images(path, split).class_names, caption_source)


def open_image_source(path: Path, pattern: str, split: str) -> ImageSource:
    """The images at a path: a saved data set, tar shards or a folder."""
    if is_saved_dataset(path):
        return require_images(load_images(path, split), path)
    return open_tar_shards(path, pattern) if is_tar_path(path) else open_image_folder(path, pattern)


def require_images(source: ImageSource, path: Path) -> ImageSource:
    if not len(source):
        raise ConfigError(f"data.path: {path} has no rows; expected at least one image, so correct the path [TM195]")
    return source


def class_captions(names: Sequence[str], caption_source: ImageCaptionSource) -> tuple[str, ...]:
    """The prompt of each class id, with ImageNet's names and ids where the classes are ImageNet's."""
    if caption_source not in ("class_name", "class_id"):
        return ()
    by_name, ids = caption_source == "class_name", wordnet_class_ids()
    if (names and all(name in ids for name in names)) or are_imagenet_names(names):
        labels = [ids.get(name, position) for position, name in enumerate(names)]
        return tuple(imagenet_labels().name(label) if by_name else str(label) for label in labels)
    return tuple(name.replace("_", " ") if by_name else str(label) for label, name in enumerate(names))


@dataclass(frozen=True)
class ClassImageDataset(CroppedImageDataset):
    """Labeled images decoded at full size and cropped as LlamaGen's data loader does."""

    spec: ClassImages

    def crop(self, index: int, draws: Sequence[float]) -> CroppedImage:
        prompt, size = self.class_prompt(self.source.label(index)), self.spec.image_size
        pixels = self.source.image(index)
        center = self.spec.crop == "center"
        square = center_crop(pixels, size) if center else random_crop(pixels, size, torch.tensor(draws[:3]))
        flipped = self.spec.random_flip and draws[3] < 0.5
        return CroppedImage(prompt, square.flip(-1) if flipped else square, index)

    def collate(self, images: Sequence[CroppedImage]) -> ImageBatch:
        pixels = torch.stack([image.pixels for image in images])[:, None]
        return ImageBatch(tuple(image.prompt for image in images), pixels)

    def first_prompts(self, count: int) -> PromptBatch:
        if self.prompts:
            return repeat_prompts(self.prompts, count)
        labels = set()
        for index in range(min(len(self), PROBED_LABELS)):
            with suppress(*READ_ERRORS):  # reported when the image is loaded
                labels.add(self.source.label(index))
        return repeat_prompts([str(label) for label in sorted(labels)] or ["0"], count)


@dataclass(frozen=True)
class ClassImages:
    """Images with classes: a folder per class, or a data set saved by `datasets`, cropped to squares."""

    path: Path
    image_size: Annotated[int, Field(ge=8, le=16384)] = 256  # pixels per side
    split: str = "train"  # of a data set saved by `datasets`
    caption_source: ClassCaptionSource = "class_name"  # class_id for models that take class ids
    crop: Crop = "center"  # random: 80 % to all of the shorter side, anywhere, as for training tokenizers
    random_flip: bool = False  # mirror images with probability 0.5
    max_skipped: NonNegativeInt = 0  # unreadable images that are skipped on each rank; one more is an error
    batch_type: ClassVar[type] = ImageBatch

    def class_prompts(self) -> tuple[str, ...]:
        return read_class_prompts(self.path, self.split, self.caption_source)

    def load(self, seed: int) -> ClassImageDataset:
        source: ImageSource = (
            load_images(self.path, self.split, labeled=True)
            if is_saved_dataset(self.path)
            else open_class_folder(self.path)
        )
        source, skipped = require_images(source, self.path), SkippedSamples(self.max_skipped)
        prompts = class_captions(source.class_names, self.caption_source)
        return ClassImageDataset(source, torch.arange(len(source)), prompts, skipped, NUM_WORKERS, seed, self)


@dataclass(frozen=True)
class CaptionedFolderDataset(PrefetchedDataset):
    """Captioned images and videos on disk, decoded when they are needed."""

    files: tuple[Path, ...]
    prompts: tuple[str, ...]
    image_size: int | None
    seed: int
    prefetch_factor: ClassVar[int] = 1  # videos are large

    def __len__(self) -> int:
        return len(self.files)

    def load_shard(self, shard: BatchShard) -> ImageBatch:
        indices = shard.indices(len(self), self.seed)
        images = [center_square(read_image(self.files[i]), self.image_size) for i in indices]
        pixels = stack_images(images, [str(self.files[i]) for i in indices])
        return ImageBatch(tuple(self.prompts[i] for i in indices), pixels)


@dataclass(frozen=True)
class CaptionedFolder:
    """Images and videos in a folder, with captions in a .txt beside each or all in a metadata.jsonl."""

    path: Path | None = None  # by default a few small images of classes, to try a recipe
    image_size: int | None = None  # pixels per side of the center square; by default images stay as they are
    batch_type: ClassVar[type] = ImageBatch

    def __post_init__(self) -> None:
        check_image_size(self.image_size)

    def load(self, seed: int) -> CaptionedFolderDataset:
        folder = self.path or EXAMPLES
        if (folder / METADATA_FILE).is_file():
            captions = read_metadata_captions(folder / METADATA_FILE, ("prompt",))
        else:
            require_directory(folder)
            files = sorted(file for file in folder.iterdir() if file.suffix.lower() in FORMATS)
            captions = {file: read_caption(file.with_suffix(".txt"), f"the caption of {file}") for file in files}
        if not captions:
            raise ConfigError(
                f"{folder}: the folder does not contain images; add files that end in {', '.join(FORMATS)}, or "
                "correct the path [TM196]"
            )
        return CaptionedFolderDataset(tuple(captions), tuple(captions.values()), self.image_size, seed)


def read_caption(path: Path, location: str) -> str:
    """The text of a caption file on one line."""
    return " ".join(line for _, line in read_lines(require_file(path, location)))
