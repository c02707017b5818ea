"""Prompts with an image each, in aspect ratio buckets: the data of offline SRPO."""

from __future__ import annotations

import io
import pickle
import pickletools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any, ClassVar, NoReturn

import torch

from ..core.registry import ConfigError
from ..core.safe_files import parse_json, read_bytes
from ..core.types import Metadata, PromptBatch
from .dataset import Dataset, epoch_permutation
from .image_io import image_size, read_image, resize_lanczos
from .text_files import get_text, read_json_rows, read_text, require_file

Size = tuple[int, int]  # height, width
COLUMNS = (("prompt", "caption"), ("image", "file_name"))  # each by either name
SUFFIXES = (".jsonl", ".json", ".pkl")

# SRPO's buckets: every size on a grid of 64 pixels, up to 1024 pixels per side, of seven aspect ratios.
BUCKET_STEP, MAX_SIDE = 64, 1024
ASPECT_RATIOS = ((16, 9), (4, 3), (1, 1), (3, 4), (9, 16), (3, 2), (2, 3))  # width, height
AREA_WEIGHT = 0.6  # of a change of area, against one of aspect ratio
MAX_AREA, MIN_AREA = 4.0, 0.1  # of a bucket, in areas of the image


@cache
def default_buckets() -> tuple[Size, ...]:
    """SRPO's buckets."""
    buckets: dict[Size, None] = {}
    for width, height in ASPECT_RATIOS:
        ratio = min(width, height) / max(width, height)
        for longer in range(BUCKET_STEP, MAX_SIDE + 1, BUCKET_STEP):
            shorter = max(BUCKET_STEP, round(longer * ratio / BUCKET_STEP) * BUCKET_STEP)
            buckets[(shorter, longer) if width >= height else (longer, shorter)] = None
    return tuple(buckets)


def nearest_bucket(height: int, width: int, buckets: Sequence[Size]) -> Size:
    """The bucket that changes aspect ratio and area the least; one of a very different area only if all are."""

    def relative_area(bucket: Size) -> float:
        return bucket[0] * bucket[1] / (height * width)

    def distance(bucket: Size) -> float:
        return abs(width / height - bucket[1] / bucket[0]) + AREA_WEIGHT * abs(1 - relative_area(bucket))

    fitting = [bucket for bucket in buckets if MIN_AREA <= relative_area(bucket) <= MAX_AREA]
    return min(fitting or buckets, key=distance)


def schedule_bucket(counts: Sequence[int], seed: int, step: int, batch_size: int) -> tuple[int, list[int]]:
    """The bucket of a step and the indices of its samples within it; an epoch visits all samples of all buckets.

    The last batch of a bucket is filled up with samples of the same bucket.
    """
    ends = [sum(-(-count // batch_size) for count in counts[: i + 1]) for i in range(len(counts))]
    epoch, position = divmod(step, ends[-1])
    block = int(epoch_permutation(ends[-1], seed, epoch)[position])
    bucket = next(i for i, end in enumerate(ends) if block < end)
    first = (block - (ends[bucket - 1] if bucket else 0)) * batch_size
    order = epoch_permutation(counts[bucket], seed, epoch)
    return bucket, [int(order[index % counts[bucket]]) for index in range(first, first + batch_size)]


@dataclass(frozen=True)
class PromptImage:
    """A prompt and the file of its image."""

    prompt: str
    file: Path
    metadata: Metadata


@dataclass(frozen=True)
class PromptImageDataset(Dataset):
    """Images on disk, decoded when they are needed and resized to their bucket; all of a step have one size."""

    entries: tuple[PromptImage, ...]
    buckets: tuple[Size, ...]
    seed: int

    def __len__(self) -> int:
        return len(self.entries)

    @cached_property
    def members(self) -> dict[Size, list[int]]:
        """Indices by bucket, of buckets that have any."""
        members: dict[Size, list[int]] = {}
        for index, entry in enumerate(self.entries):
            members.setdefault(nearest_bucket(*image_size(entry.file), self.buckets), []).append(index)
        return members

    def batch(self, step: int, batch_size: int, rank: int, world_size: int) -> PromptBatch:
        counts = [len(indices) for indices in self.members.values()]
        bucket_index, chosen = schedule_bucket(counts, self.seed, step, batch_size)
        bucket, members = list(self.members.items())[bucket_index]
        shard = chosen[rank * batch_size // world_size : (rank + 1) * batch_size // world_size]
        entries = [self.entries[members[i]] for i in shard]
        images = torch.stack([resize_lanczos(read_image(entry.file)[:1], *bucket) for entry in entries])
        return PromptBatch(tuple(entry.prompt for entry in entries), tuple(entry.metadata for entry in entries), images)

    def first_prompts(self, count: int) -> PromptBatch:
        entries = [self.entries[i % len(self)] for i in range(count)]
        return PromptBatch(tuple(entry.prompt for entry in entries), tuple(entry.metadata for entry in entries))


@dataclass(frozen=True)
class PromptsWithImages:
    """Prompts with an image each: a .jsonl with the columns `prompt` and `image`, or SRPO's .json or .pkl, which maps
    captions to images; paths are relative to the file."""

    path: Path
    buckets: tuple[Size, ...] = ()  # heights and widths that images are resized to; by default SRPO's
    batch_type: ClassVar[type] = PromptBatch

    def __post_init__(self) -> None:
        if self.path.suffix not in SUFFIXES:
            raise ValueError(
                f"'path': expected a file name that ends in {', '.join(SUFFIXES)}, got {str(self.path)!r:.60}; "
                "convert or rename the file [TM212]"
            )
        wrong = [size for size in self.buckets if any(side % 16 or not 16 <= side <= 8192 for side in size)]
        if wrong:
            raise ValueError(
                f"'buckets': expected multiples of 16, from 16 to 8192, got {list(wrong[0])}; correct this bucket "
                "[TM213]"
            )

    def load(self, seed: int) -> PromptImageDataset:
        entries = read_jsonl_entries(self.path) if self.path.suffix == ".jsonl" else read_caption_map(self.path)
        return PromptImageDataset(tuple(entries), self.buckets or default_buckets(), seed)


def read_jsonl_entries(path: Path) -> list[PromptImage]:
    """The entries of a JSONL file; columns other than prompt and image are metadata."""
    entries = []
    for number, row in read_json_rows(path):
        columns = [next((name for name in names if name in row), names[0]) for names in COLUMNS]
        prompt, image = (get_text(path, number, row, column) for column in columns)
        metadata = {key: value for key, value in row.items() if not any(key in names for names in COLUMNS)}
        entries.append(PromptImage(prompt, require_file(path.parent / image, f"{path}, line {number}"), metadata))
    return entries


def read_caption_map(path: Path) -> list[PromptImage]:
    """The entries of a .json or .pkl that maps captions to image paths."""
    images = load_document(path)
    if not isinstance(images, Mapping) or not all(isinstance(x, str) for pair in images.items() for x in pair):
        images = {}
    if not images:
        raise ConfigError(
            f'{path} does not map captions to image paths; write an object such as {{"a cat": "cat.png"}}, or use a '
            ".jsonl file [TM214]"
        )
    return [
        PromptImage(caption, require_file(path.parent / image, f"{path}, '{caption:.40}'"), {})
        for caption, image in images.items()
    ]


class PlainDataUnpickler(pickle.Unpickler):
    """Unpickles strings, numbers and containers; refuses classes, which could run code."""

    def find_class(self, module: str, name: str) -> NoReturn:
        raise pickle.UnpicklingError(f"it asks for {module}.{name}, which could run code")


def unpickle_plain_data(data: bytes) -> Any:
    """The content of a pickle whose memo is not larger than the pickle, as one made to take memory has it."""
    for opcode, argument, _ in pickletools.genops(data):
        if opcode.name.endswith("PUT") and isinstance(argument, int) and argument > len(data):
            raise pickle.UnpicklingError(f"its memo has the index {argument}")
    return PlainDataUnpickler(io.BytesIO(data)).load()


def load_document(path: Path) -> Any:
    """The content of a .json or .pkl file."""
    try:
        if path.suffix == ".json":
            return parse_json(read_text(path), path)
        return unpickle_plain_data(read_bytes(path))
    except ConfigError:
        raise
    except Exception as error:  # a damaged pickle may raise anything
        raise ConfigError(f"{path} cannot be read ({error!s:.200}); convert the file to .jsonl [TM215]") from error
