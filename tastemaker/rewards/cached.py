"""Cache of scores, for rewards that take long: in memory or in an SQLite file shared by runs and processes."""

from __future__ import annotations

import hashlib
import json
import math
import os
import sqlite3
import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Self

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from .. import __version__
from ..core.registry import ConfigError
from ..core.reward import Reward, RewardSpec, load_shared_reward
from ..core.types import Metadata, Placement, Prompts
from .wrappers import RewardWrapper

MAX_QUERY = 500  # keys per query; SQLite takes no more than 999
TABLE = "CREATE TABLE IF NOT EXISTS scores (id INTEGER PRIMARY KEY AUTOINCREMENT, key BLOB UNIQUE, score REAL NOT NULL)"


@dataclass(frozen=True)
class CachedReward(RewardWrapper):
    """Scores of the same pixels, prompt and metadata are computed once; with gradients they are computed every time."""

    reward: RewardSpec
    directory: Path | None = None  # of the SQLite file, for all runs and processes; in memory if not given
    max_entries: Annotated[int, Field(ge=1)] = 1_000_000  # beyond them the oldest are dropped

    def __post_init__(self) -> None:
        if self.reward.needs_group:
            raise ValueError(
                f"'reward': {type(self.reward).__name__} compares the samples of a prompt, so that a score belongs to "
                "its group, not to its image; cache the reward inside instead [TM1582]"
            )

    def load(self, placement: Placement) -> Reward:
        inner = load_shared_reward(self.reward, placement)
        cache = ScoreCache(self.directory / "scores.sqlite" if self.directory else None, self.max_entries)
        return CachedScorer(self, inner, cache, f"{reward_fingerprint(self.reward)} {placement.dtype} {inner.version}")

    def tiny(self) -> Self:
        return replace(self, reward=self.reward.tiny(), directory=None)

    def score_with(self, inner: Reward, pixels: Tensor, prompts: Prompts, metadata: Sequence[Metadata]) -> Tensor:
        return inner.score(pixels, prompts, metadata)


@dataclass(frozen=True)
class CachedScorer(Reward):
    spec: CachedReward
    inner: Reward
    cache: ScoreCache
    identity: str

    @property
    def needs_copy(self) -> bool:
        return self.inner.needs_copy

    def metrics(self) -> dict[str, float]:
        return self.inner.metrics()

    def persist_in(self, directory: Path) -> None:
        self.inner.persist_in(directory)

    def score(self, pixels: Tensor, prompts: Prompts, metadata: Sequence[Metadata]) -> Tensor:
        if torch.is_grad_enabled() and pixels.requires_grad:
            return self.spec.score_with(self.inner, pixels, prompts, metadata)
        samples = zip(pixels.detach().cpu(), prompts, metadata, strict=True)
        keys = [score_key(self.identity, *sample) for sample in samples]
        scores = self.cache.get(keys)
        missing = {key: i for i, key in enumerate(keys) if key not in scores}  # equal samples are scored once
        if missing:
            indices = list(missing.values())
            new = self.inner.score(pixels[indices], [prompts[i] for i in indices], [metadata[i] for i in indices])
            new_scores = dict(zip(missing, new.tolist(), strict=True))
            self.cache.put({key: score for key, score in new_scores.items() if math.isfinite(score)})
            scores |= new_scores
        return torch.tensor([scores[key] for key in keys], device=pixels.device)


class ScoreCache:
    """Scores by key in SQLite, on disk or in memory, safe for several threads and processes."""

    def __init__(self, path: Path | None, max_entries: int) -> None:
        self.path, self.max_entries, self._lock = path, max_entries, threading.Lock()
        with self._errors_as_config_errors():
            if path is not None:
                path.parent.mkdir(parents=True, exist_ok=True)
            self._database = sqlite3.connect(
                path or ":memory:", timeout=60, isolation_level="IMMEDIATE", check_same_thread=False
            )
            weakref.finalize(self, self._database.close)
            self._database.execute(TABLE)

    def get(self, keys: Sequence[bytes]) -> dict[bytes, float]:
        """The scores of the keys that the cache holds."""
        scores: dict[bytes, float] = {}
        with self._errors_as_config_errors(), self._lock:
            for start in range(0, len(keys), MAX_QUERY):
                chunk = keys[start : start + MAX_QUERY]
                marks = ",".join("?" * len(chunk))
                scores |= dict(self._database.execute(f"SELECT key, score FROM scores WHERE key IN ({marks})", chunk))
        return scores

    def put(self, scores: Mapping[bytes, float]) -> None:
        """Add scores, and drop the oldest beyond `max_entries`."""
        with self._errors_as_config_errors(), self._lock, self._database:
            self._database.executemany("INSERT OR IGNORE INTO scores (key, score) VALUES (?, ?)", scores.items())
            self._database.execute(
                "DELETE FROM scores WHERE id <= (SELECT max(id) FROM scores) - ?", [self.max_entries]
            )

    @contextmanager
    def _errors_as_config_errors(self) -> Iterator[None]:
        try:
            yield
        except (sqlite3.Error, OSError) as error:
            raise ConfigError(
                f"the score cache {self.path} cannot be used ({error}); remove or move this file [TM374]"
            ) from error


def score_key(identity: str, pixels: Tensor, prompt: str, metadata: Metadata) -> bytes:
    """A hash of 32 bytes over everything that a score depends on; pixels [F, 3, H, W] are on the CPU."""
    header = json.dumps([identity, list(pixels.shape), prompt, metadata], sort_keys=True, default=_to_json)
    digest = hashlib.blake2b(header.encode(), digest_size=32)
    digest.update(pixels.float().contiguous().numpy().data)
    return digest.digest()


def _to_json(value: object) -> Any:
    """A JSON value that differs where arrays, tensors or files differ."""
    if isinstance(value, np.ndarray):
        value = torch.from_numpy(np.ascontiguousarray(value))
    if isinstance(value, Tensor):
        content = value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()
        return [str(value.dtype), list(value.shape), hashlib.blake2b(content.data, digest_size=16).hexdigest()]
    if isinstance(value, Path):
        return [str(value), _file_stats(value)]
    raise TypeError(
        f"metadata holds a {type(value).__name__}, which cannot be part of a cache key; use numbers, text, lists and "
        "mappings [TM375]"
    )


def reward_fingerprint(spec: object) -> str:
    """A hash of a reward: its class, its settings, the files they name, and the version of this package."""
    kind = f"{type(spec).__module__}.{type(spec).__qualname__}"
    files = [(str(path), _file_stats(Path(path))) for path in _paths_in(spec) if os.path.exists(path)]
    return hashlib.blake2b(repr((__version__, kind, spec, files)).encode(), digest_size=8).hexdigest()


def _paths_in(value: object) -> Iterator[str | Path]:
    """Every string or path in the settings, which might be that of a file."""
    if is_dataclass(value):
        for f in fields(value):
            yield from _paths_in(getattr(value, f.name))
    elif isinstance(value, tuple):
        for item in value:
            yield from _paths_in(item)
    elif isinstance(value, (str, Path)):
        yield value


def _file_stats(path: Path) -> list[tuple[str, int, int]]:
    """Name, modification time and size of a file, or of those in a folder."""
    files = sorted(path.iterdir()) if path.is_dir() else [path] if path.exists() else []
    return [(file.name, file.stat().st_mtime_ns, file.stat().st_size) for file in files]
