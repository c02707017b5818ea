"""Precomputed latents of images: the safetensors shards that `tastemaker encode --vae` writes."""

from __future__ import annotations

import hashlib
import json
import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property, lru_cache
from itertools import accumulate
from pathlib import Path
from typing import Any, ClassVar

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ..core.output_paths import write_text_atomically
from ..core.randomness import Purpose, Randomness
from ..core.registry import ConfigError
from ..core.safe_files import parse_json, read_json
from ..core.types import LatentBatch, PromptBatch
from .dataset import repeat_prompts
from .image_sources import walk_files
from .images import ImageCaptionSource, class_captions
from .prefetch import BatchShard, PrefetchedDataset

MANIFEST = "latents.json"
SHARD_METADATA = "samples"  # the key of the safetensors metadata
MAX_CACHED_BYTES = 16 * 2**30  # of more latents, each is read from disk when it is needed


@dataclass(frozen=True)
class LatentManifest:
    """What the latents of a folder were computed from; its fields are the keys of latents.json."""

    autoencoder: str  # fingerprint
    data: str  # fingerprint of the image files
    images: str  # path
    num_images: int
    image_size: int  # pixels per side
    views: int  # latents per image: the center square, then its mirror image
    shape: tuple[int, int, int]  # of a latent
    caption_source: str
    class_names: tuple[str, ...]
    shard_size: int  # images per shard

    @property
    def num_shards(self) -> int:
        return -(-self.num_images // self.shard_size)

    def shard_file(self, shard: int) -> str:
        return f"latents-{shard:05d}-of-{self.num_shards:05d}.safetensors"

    def shard_range(self, shard: int) -> range:
        """Indices of the images of a shard."""
        return range(shard * self.shard_size, min((shard + 1) * self.shard_size, self.num_images))

    def write(self, folder: Path) -> None:
        """Write latents.json; every rank writes the same content."""
        write_text_atomically(folder / MANIFEST, json.dumps(asdict(self), indent=1))


def read_manifest(folder: Path) -> LatentManifest:
    try:
        content: dict[str, Any] = read_json(folder / MANIFEST)
        tuples = {key: tuple(content[key]) for key in ("shape", "class_names")}
        return LatentManifest(**{**content, **tuples})
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ConfigError(
            f"data.path: {folder} does not contain latents ({error!s:.100}); write latents with `tastemaker "
            "encode --vae` [TM197]"
        ) from error


def files_fingerprint(path: Path) -> str:
    """Fingerprint of the names and sizes of all files below a path, without latents that were written there."""
    files = walk_files(path) if path.is_dir() else [path]
    latent_folders = {file.parent for file in files if file.name == MANIFEST}
    digest = hashlib.sha256()
    for file in (file for file in files if file.parent not in latent_folders):
        digest.update(f"{file.relative_to(path)}\0{file.stat().st_size}\0".encode())
    return digest.hexdigest()[:16]


@dataclass(frozen=True)
class LatentShard:
    """The metadata of a shard."""

    path: Path
    prompts: tuple[str, ...]
    class_ids: tuple[int, ...]  # -1 where an image has no class
    sums: tuple[float, float]  # of all values, and of their squares
    num_values: int
    skipped: tuple[str, ...] = ()  # messages about images that could not be read


def read_shard(path: Path) -> LatentShard:
    try:
        with safe_open(path, framework="pt") as file:
            content = parse_json((file.metadata() or {})[SHARD_METADATA], path)
        return LatentShard(
            path,
            tuple(content["prompts"]),
            tuple(content["class_ids"]),
            tuple(content["sums"]),
            int(content["num_values"]),
            tuple(content["skipped"]),
        )
    except (OSError, SafetensorError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{path} cannot be read ({error!s:.100}); remove this file and run `tastemaker encode` again [TM198]"
        ) from error


@lru_cache(maxsize=64)
def open_shard(path: Path) -> Any:
    return safe_open(path, framework="pt")


@dataclass(frozen=True)
class LatentDataset(PrefetchedDataset):
    """Latents with one random view of each image."""

    manifest: LatentManifest
    shards: tuple[LatentShard, ...]
    prompts: tuple[str, ...]  # by sample
    seed: int

    def __len__(self) -> int:
        return len(self.prompts)

    @cached_property
    def shard_ends(self) -> list[int]:
        """Number of samples up to the end of each shard; shards with unreadable images have fewer than others."""
        return list(accumulate(len(shard.class_ids) for shard in self.shards))

    @cached_property
    def std(self) -> float:
        """Standard deviation of all latents, from sums taken while they were encoded."""
        count = sum(shard.num_values for shard in self.shards)
        mean, square = (sum(shard.sums[i] for shard in self.shards) / count for i in (0, 1))
        return math.sqrt(max(square - mean**2, 1e-12))

    @cached_property
    def cache(self) -> Tensor:
        """All latents in memory: [N, V, C, h, w]."""
        first: Tensor = open_shard(self.shards[0].path).get_tensor("latents")
        latents = first.new_empty(len(self), *first.shape[1:])
        for shard, end in zip(self.shards, self.shard_ends, strict=True):
            latents[end - len(shard.class_ids) : end] = open_shard(shard.path).get_tensor("latents")
        return latents

    def load_shard(self, shard: BatchShard) -> LatentBatch:
        manifest, draws = self.manifest, Randomness(self.seed, shard.step, shard.rows).uniform(Purpose.VIEW, 1)
        views = (draws.flatten() * manifest.views).long().tolist()
        indices = shard.indices(len(self), self.seed)
        if 2 * math.prod(manifest.shape) * manifest.views * manifest.num_images <= MAX_CACHED_BYTES:
            x = self.cache[torch.tensor(indices), torch.tensor(views)]
        else:
            x = torch.stack([self._read(index, view) for index, view in zip(indices, views, strict=True)])
        return LatentBatch(tuple(self.prompts[i] for i in indices), x.float(), manifest.autoencoder, self.std)

    def _read(self, index: int, view: int) -> Tensor:
        shard = bisect_right(self.shard_ends, index)
        row = index - (self.shard_ends[shard - 1] if shard else 0)
        return open_shard(self.shards[shard].path).get_slice("latents")[row, view]  # type: ignore[no-any-return]

    def first_prompts(self, count: int) -> PromptBatch:
        return repeat_prompts(list(dict.fromkeys(self.prompts))[:count], count)


@dataclass(frozen=True)
class LatentFolder:
    """Latents with a prompt each, as `tastemaker encode --vae` writes them."""

    path: Path
    caption_source: ImageCaptionSource | None = None  # the prompt of an image; by default as it was encoded
    batch_type: ClassVar[type] = LatentBatch

    def load(self, seed: int) -> LatentDataset:
        manifest = read_manifest(self.path)
        images = Path(manifest.images)
        if images.exists() and files_fingerprint(images) != manifest.data:
            raise ConfigError(
                f"data.path: {self.path} was encoded from {images}, but files there were added, removed or "
                f"changed since then; encode it again into another folder, or remove {self.path} first [TM199]"
            )
        files = [self.path / manifest.shard_file(i) for i in range(manifest.num_shards)]
        complete = sum(file.is_file() for file in files)
        if complete < len(files):
            raise ConfigError(
                f"data.path: {self.path} holds {complete} of {len(files)} shards; run the same `tastemaker "
                "encode` command again to write the missing shards [TM200]"
            )
        shards = tuple(map(read_shard, files))
        if not any(shard.class_ids for shard in shards):
            raise ConfigError(
                f"data.path: {self.path} does not contain latents, because none of the {manifest.num_images} "
                "images could be read; check the images and encode them again [TM201]"
            )
        return LatentDataset(manifest, shards, self._prompts(manifest, shards), seed)

    def _prompts(self, manifest: LatentManifest, shards: Sequence[LatentShard]) -> tuple[str, ...]:
        class_ids = [class_id for shard in shards for class_id in shard.class_ids]
        if self.caption_source is None or self.caption_source == manifest.caption_source:
            return tuple(prompt for shard in shards for prompt in shard.prompts)
        if self.caption_source == "empty":
            return ("",) * len(class_ids)
        if self.caption_source == "caption" or -1 in class_ids:
            raise ConfigError(
                f"data.caption_source: {self.path} was encoded with '{manifest.caption_source}' and has no "
                f"{self.caption_source}; set data.caption_source={manifest.caption_source}, or encode the images "
                "again [TM202]"
            )
        prompts = class_captions(manifest.class_names, self.caption_source)
        return tuple(prompts[class_id] if prompts else str(class_id) for class_id in class_ids)
