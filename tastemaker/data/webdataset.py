"""WebDataset's tar shards: files of one name but for what follows its first dot are one sample, read where they lie."""

from __future__ import annotations

import json
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from ..core.registry import ConfigError
from .hf_datasets import LABELS, PROMPTS
from .image_io import IMAGE_FORMATS

PACKED = (".tar.gz", ".tgz", ".tar.bz2", ".tar.xz", ".tar.zst")
CLASSES = ("cls", *LABELS)  # a sample's class, as a file or in its JSON
CAPTION_SUFFIXES = ("txt", "caption")  # files that are captions
LOOKED_AT = 64  # samples, for whether there are captions at all


@dataclass(frozen=True, slots=True)  # there may be millions of them
class TarSample:
    """Where a sample's files lie in its shard: by what follows the first dot of their names, start and length."""

    shard: Path
    key: str
    parts: dict[str, tuple[int, int]]

    def read(self, part: str) -> bytes:
        start, length = self.parts[part]
        with self.shard.open("rb") as file:
            file.seek(start)
            found = file.read(length)
        if len(found) < length:
            raise ValueError(f"{self.shard} ends within it, expected {length} bytes")
        return found

    def told(self) -> dict[str, Any]:
        """What its JSON says."""
        found = json.loads(self.read("json")) if "json" in self.parts else {}
        if not isinstance(found, dict):
            raise ValueError(f"its JSON is a {type(found).__name__}, expected an object")
        return found

    @property
    def picture(self) -> str | None:
        return next((part for part in self.parts if f".{part.lower()}" in IMAGE_FORMATS), None)


@dataclass(frozen=True)
class TarShards:
    """Samples that have a picture, in the order of their shards."""

    samples: tuple[TarSample, ...]
    captioned: bool
    names: tuple[str, ...] = ()  # classes are numbers alone

    def __len__(self) -> int:
        return len(self.samples)

    def name(self, number: int) -> str:
        sample = self.samples[number]
        return f"{sample.key} in {sample.shard}"

    def encoded(self, number: int) -> bytes:
        sample = self.samples[number]
        return sample.read(sample.picture or "")

    def label(self, number: int) -> int:
        sample = self.samples[number]
        own = next((part for part in CLASSES if part in sample.parts), None)
        told = {} if own else sample.told()
        value = sample.read(own).decode() if own else next((told[key] for key in CLASSES if key in told), None)
        if isinstance(value, bool) or not str(value).strip().isdecimal():
            raise ValueError(
                f"its class is {value!r:.40}, expected a number in .cls or under `cls` or `label` in .json"
            )
        return int(str(value))

    def caption(self, number: int) -> str:
        sample = self.samples[number]
        own = next((part for part in CAPTION_SUFFIXES if part in sample.parts), None)
        if own:
            return " ".join(sample.read(own).decode().split())
        told = sample.told()
        value = next((told[key] for key in PROMPTS if key in told), None)
        if not isinstance(value, str):
            raise ValueError(f"its caption is {value!r:.40}, expected .txt, or {', '.join(PROMPTS)} in .json")
        return value


def are_shards(path: Path) -> bool:
    """Whether it is a tar, or a folder that holds some."""
    return path.name.endswith((".tar", *PACKED)) or (path.is_dir() and any(path.glob("*.tar")))


def open_tar_shards(path: Path, match: str = "*") -> TarShards:
    """The samples of a shard, or of those in a folder whose names match, which are looked through once."""
    if path.name.endswith(PACKED):
        raise ConfigError(f"{path} is compressed, so that nothing in it can be found; unpack it to a .tar")
    files = sorted(path.glob("*.tar")) if path.is_dir() else [path]
    chosen = [file for file in files if fnmatch(file.name, match)]
    if not chosen:
        raise ConfigError(f"data.match: none of the {len(files)} shards in {path} matches '{match:.60}'")
    samples = tuple(sample for file in chosen for sample in index_shard(file) if sample.picture)
    if not samples:
        raise ConfigError(f"{path}: its shards hold no pictures; expected files that end in {', '.join(IMAGE_FORMATS)}")
    return TarShards(samples, any(_captioned(sample) for sample in samples[:LOOKED_AT]))


def _captioned(sample: TarSample) -> bool:
    try:
        return any(part in sample.parts for part in CAPTION_SUFFIXES) or any(key in sample.told() for key in PROMPTS)
    except ValueError:
        return False  # which is told of when its turn comes


def index_shard(file: Path) -> Iterator[TarSample]:
    """A shard's samples, in order; of its content nothing is read."""
    found: dict[str, dict[str, tuple[int, int]]] = {}
    try:
        with tarfile.open(file, "r:") as tar:
            for member in tar:
                folder, _, name = member.name.rpartition("/")
                stem, dot, part = name.partition(".")
                if member.isfile() and dot and stem:
                    parts = found.setdefault(f"{folder}/{stem}" if folder else stem, {})
                    parts[part.lower()] = (member.offset_data, member.size)
    except (tarfile.TarError, OSError, EOFError) as error:
        raise ConfigError(f"{file} cannot be read as a tar ({error!s:.200}); fetch it again or remove it") from error
    for key, parts in found.items():
        yield TarSample(file, key, parts)
