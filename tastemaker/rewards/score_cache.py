"""Scores remembered by what was scored, safe for several threads and processes."""

from __future__ import annotations

import hashlib
import json
import os
import sqlite3
import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .. import __version__
from ..core.registry import ConfigError
from ..core.types import Metadata

MOST = 500  # keys a query; SQLite takes no more than 999
TABLE = "CREATE TABLE IF NOT EXISTS scores (id INTEGER PRIMARY KEY AUTOINCREMENT, key BLOB UNIQUE, score REAL NOT NULL)"


class ScoreCache:
    """Numbers by key in SQLite, on disk or in memory; beyond its size, the oldest are forgotten."""

    def __init__(self, path: Path | None, size: int) -> None:
        self.path, self.size, self._lock = path, size, threading.Lock()
        with self._told():
            if path is not None:
                path.parent.mkdir(parents=True, exist_ok=True)
            self._base = sqlite3.connect(
                path or ":memory:", timeout=60, isolation_level="IMMEDIATE", check_same_thread=False
            )
            weakref.finalize(self, self._base.close)
            self._base.execute(TABLE)

    def get(self, keys: Sequence[bytes]) -> dict[bytes, float]:
        """Those that are known."""
        known: dict[bytes, float] = {}
        with self._told(), self._lock:
            for start in range(0, len(keys), MOST):
                some = keys[start : start + MOST]
                marks = ",".join("?" * len(some))
                known |= dict(self._base.execute(f"SELECT key, score FROM scores WHERE key IN ({marks})", some))
        return known

    def put(self, scores: Mapping[bytes, float]) -> None:
        with self._told(), self._lock, self._base:
            self._base.executemany("INSERT OR IGNORE INTO scores (key, score) VALUES (?, ?)", scores.items())
            self._base.execute("DELETE FROM scores WHERE id <= (SELECT max(id) FROM scores) - ?", [self.size])

    @contextmanager
    def _told(self) -> Iterator[None]:
        try:
            yield
        except (sqlite3.Error, OSError) as error:
            raise ConfigError(f"the score cache {self.path} cannot be used ({error}); remove it, or move it") from error


def score_key(identity: str, row: Tensor, prompt: str, facts: Metadata) -> bytes:
    """What a score depends on, as 32 bytes; the row is on the host: [F, 3, H, W]."""
    words = json.dumps([identity, list(row.shape), prompt, facts], sort_keys=True, default=_plain)
    digest = hashlib.blake2b(words.encode(), digest_size=32)
    digest.update(row.float().contiguous().numpy().data)
    return digest.digest()


def _plain(value: object) -> Any:
    """What JSON does not know, as something that differs where it differs."""
    if isinstance(value, np.ndarray):
        value = torch.from_numpy(np.ascontiguousarray(value))
    if isinstance(value, Tensor):
        content = value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()
        return [str(value.dtype), list(value.shape), hashlib.blake2b(content.data, digest_size=16).hexdigest()]
    if isinstance(value, Path):
        return [str(value), _written(value)]
    raise TypeError(f"found a {type(value).__name__} among the facts, by which no score can be remembered")


def reward_fingerprint(spec: object) -> str:
    """What a reward is, in a few letters: its class and settings, the files they name, and our version."""
    kind = f"{type(spec).__module__}.{type(spec).__qualname__}"
    files = [(str(path), _written(Path(path))) for path in _named(spec) if os.path.exists(path)]
    return hashlib.blake2b(repr((__version__, kind, spec, files)).encode(), digest_size=8).hexdigest()


def _named(value: object) -> Iterator[str | Path]:
    """Whatever in the settings might be the path of a file."""
    if is_dataclass(value):
        for f in fields(value):
            yield from _named(getattr(value, f.name))
    elif isinstance(value, tuple):
        for item in value:
            yield from _named(item)
    elif isinstance(value, (str, Path)):
        yield value


def _written(path: Path) -> list[tuple[str, int, int]]:
    """When and how large a file is, or those in a folder."""
    files = sorted(path.iterdir()) if path.is_dir() else [path] if path.exists() else []
    return [(file.name, file.stat().st_mtime_ns, file.stat().st_size) for file in files]
