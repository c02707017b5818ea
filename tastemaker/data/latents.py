"""Latents of pictures, encoded beforehand: the shards of safetensors that `tastemaker encode --vae` writes."""

from __future__ import annotations

import hashlib
import json
import math
import os
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property, lru_cache
from itertools import accumulate
from pathlib import Path
from typing import Any, ClassVar
from uuid import uuid4

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ..core.randomness import Randomness
from ..core.registry import ConfigError
from ..core.types import LatentBatch, PromptBatch
from .class_images import class_captions
from .image_tree import walk_files
from .images import GalleryCaption
from .prefetch import BatchShard, Prefetcher, whole_batch_prefetcher
from .sampler import batch_indices

MANIFEST = "latents.json"
HELD = 16 * 2**30  # bytes that are kept in memory; of more, every row is read when its turn comes


@dataclass(frozen=True)
class LatentManifest:
    """What a folder of latents was made of; made of anything else, it is another."""

    codec: str  # fingerprint
    data: str  # likewise
    pictures: str
    count: int  # of pictures
    size: int  # pixels a side
    views: int  # of each: its middle, then mirrored
    shape: tuple[int, int, int]  # of a latent
    say: str
    names: tuple[str, ...]  # of the classes
    rows: int  # of a shard

    @property
    def shards(self) -> int:
        return -(-self.count // self.rows)

    def file(self, number: int) -> str:
        return f"latents-{number:05d}-of-{self.shards:05d}.safetensors"

    def numbers(self, number: int) -> range:
        """Of the pictures of a shard."""
        return range(number * self.rows, min((number + 1) * self.rows, self.count))

    def write(self, folder: Path) -> None:
        """All of it or none; every rank writes the same."""
        folder.mkdir(parents=True, exist_ok=True)
        partial = folder / f".{MANIFEST}.{uuid4().hex}"  # every rank writes it, and process numbers may be alike
        partial.write_text(json.dumps(asdict(self), indent=1), encoding="utf-8")
        os.replace(partial, folder / MANIFEST)


def read_manifest(folder: Path) -> LatentManifest:
    try:
        found: dict[str, Any] = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        return LatentManifest(**{**found, "shape": tuple(found["shape"]), "names": tuple(found["names"])})
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ConfigError(
            f"{folder} holds no latents ({error!s:.100}); write some with `tastemaker encode --vae`"
        ) from error


def files_fingerprint(path: Path) -> str:
    """Of the names and sizes of all files below a path, but for latents that were written there."""
    files = walk_files(path) if path.is_dir() else [path]
    ours = {file.parent for file in files if file.name == MANIFEST}
    digest = hashlib.sha256()
    for file in (file for file in files if file.parent not in ours):
        digest.update(f"{file.relative_to(path)}\0{file.stat().st_size}\0".encode())
    return digest.hexdigest()[:16]


@dataclass(frozen=True)
class LatentShard:
    path: Path
    prompts: tuple[str, ...]
    labels: tuple[int, ...]
    sums: tuple[float, float]  # of all numbers in it, and of their squares
    numbers: int  # how many there are
    skipped: tuple[str, ...] = ()  # what is wrong with pictures that could not be used, and have no row


def read_shard(path: Path) -> LatentShard:
    try:
        with safe_open(path, framework="pt") as file:
            said = json.loads((file.metadata() or {})["told"])
        rows, skipped = (tuple(said["prompts"]), tuple(said["labels"])), tuple(said.get("skipped", ()))
        return LatentShard(path, *rows, tuple(said["sums"]), int(said["numbers"]), skipped)
    except (OSError, SafetensorError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{path} cannot be read ({error!s:.100}); remove it and run `tastemaker encode` again"
        ) from error


@lru_cache(maxsize=64)
def open_shard(path: Path) -> Any:
    return safe_open(path, framework="pt")


@dataclass(frozen=True)
class LatentDataset:
    """Latents in an order of the seed's, one of each picture's views by chance."""

    note: LatentManifest
    shards: tuple[LatentShard, ...]
    prompts: tuple[str, ...]  # of each picture
    seed: int

    def __len__(self) -> int:
        return len(self.prompts)

    @cached_property
    def ends(self) -> list[int]:
        """How many rows there are up to the end of each shard; where pictures were broken, it has fewer than others."""
        return list(accumulate(len(shard.labels) for shard in self.shards))

    @cached_property
    def deviation(self) -> float:
        """Of all latents, as they were measured while they were encoded."""
        count = sum(shard.numbers for shard in self.shards)
        mean, square = (sum(shard.sums[i] for shard in self.shards) / count for i in (0, 1))
        return math.sqrt(max(square - mean**2, 1e-12))

    @cached_property
    def kept(self) -> Tensor:
        """All of them, [N, V, C, h, w]: rows of a batch are then taken at once."""
        first: Tensor = open_shard(self.shards[0].path).get_tensor("latents")
        whole = first.new_empty(len(self), *first.shape[1:])
        for shard, end in zip(self.shards, self.ends, strict=True):
            whole[end - len(shard.labels) : end] = open_shard(shard.path).get_tensor("latents")
        return whole

    @cached_property
    def ahead(self) -> Prefetcher[LatentBatch, LatentBatch]:
        return whole_batch_prefetcher(self._made)

    def batch(self, step: int, size: int, rank: int, world: int) -> LatentBatch:
        return self.ahead.take(BatchShard(step, size, rank, world))

    def _made(self, share: BatchShard) -> LatentBatch:
        step, size, rank, world = share.step, share.size, share.rank, share.world
        mine = torch.arange(rank * size // world, (rank + 1) * size // world)
        views = (Randomness(self.seed, step, mine).uniform("view", 1).flatten() * self.note.views).long().tolist()
        chosen = batch_indices(len(self), self.seed, step, size, rank, world)
        if 2 * math.prod(self.note.shape) * self.note.views * self.note.count <= HELD:
            x = self.kept[torch.tensor(chosen), torch.tensor(views)]
        else:
            x = torch.stack([self._row(number, view) for number, view in zip(chosen, views, strict=True)])
        return LatentBatch(tuple(self.prompts[i] for i in chosen), x.float(), self.note.codec, self.deviation)

    def _row(self, number: int, view: int) -> Tensor:
        shard = bisect_right(self.ends, number)
        row = number - (self.ends[shard - 1] if shard else 0)
        found: Tensor = open_shard(self.shards[shard].path).get_slice("latents")[row, view]
        return found

    def first(self, count: int) -> PromptBatch:
        known = list(dict.fromkeys(self.prompts))[:count]
        return PromptBatch(tuple(known[i % len(known)] for i in range(count)), ({},) * count)


@dataclass(frozen=True)
class LatentFolder:
    """What `tastemaker encode --vae` wrote: latents, with what is said of each picture."""

    path: Path
    say: GalleryCaption | None = None  # of a picture; as it was encoded if not given
    yields: ClassVar[type] = LatentBatch

    def load(self, seed: int) -> LatentDataset:
        found = read_manifest(self.path)
        check_unchanged(found, self.path)
        missing = [i for i in range(found.shards) if not (self.path / found.file(i)).is_file()]
        if missing:
            raise ConfigError(
                f"{self.path} holds {found.shards - len(missing)} of {found.shards} shards; run `tastemaker encode` "
                "again, it goes on"
            )
        shards = tuple(read_shard(self.path / found.file(i)) for i in range(found.shards))
        if not any(shard.labels for shard in shards):
            raise ConfigError(f"{self.path} holds no latents: of {found.count} pictures none could be used; check them")
        return LatentDataset(found, shards, self._prompts(found, shards), seed)

    def _prompts(self, found: LatentManifest, shards: Sequence[LatentShard]) -> tuple[str, ...]:
        labels = [label for shard in shards for label in shard.labels]
        if self.say is None or self.say == found.say:
            return tuple(prompt for shard in shards for prompt in shard.prompts)
        if self.say == "nothing":
            return ("",) * len(labels)
        if self.say == "caption" or -1 in labels:
            raise ConfigError(
                f"data.say: {self.path} was encoded with say '{found.say}' and knows no {self.say}; encode it again"
            )
        known = class_captions(found.names, self.say)
        return tuple(known[label] if known else str(label) for label in labels)


def check_unchanged(found: LatentManifest, folder: Path) -> None:
    """Refuse latents of pictures that have changed since, where those are still there."""
    pictures = Path(found.pictures)
    if pictures.exists() and files_fingerprint(pictures) != found.data:
        raise ConfigError(
            f"{folder} was made of {pictures} as it no longer is: files were added, removed or changed; encode it "
            "again into another folder, or remove this one"
        )
