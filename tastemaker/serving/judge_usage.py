"""What was asked of a judge, kept in files, so that a budget holds for all ranks of a run and after a restart.

Each process writes a file of its own and reads those of the others. No file has two writers, so no lock is needed.
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
import time
import uuid
from dataclasses import dataclass
from pathlib import Path

from ..core.registry import ConfigError
from ..core.safe_files import read_json_object

REFRESH_SECONDS = 1.0  # between two looks at the files of other processes
FIELDS = ("requests", "prompt_tokens", "completion_tokens")


@dataclass(frozen=True)
class UsageCount:
    """Requests and tokens."""

    requests: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0

    def __add__(self, other: UsageCount) -> UsageCount:
        return UsageCount(*(a + b for a, b in zip(self.values(), other.values(), strict=True)))

    def __sub__(self, other: UsageCount) -> UsageCount:
        return UsageCount(*(a - b for a, b in zip(self.values(), other.values(), strict=True)))

    def values(self) -> tuple[int, int, int]:
        return self.requests, self.prompt_tokens, self.completion_tokens


class UsageFiles:
    """The file of this process, and those of the others that count for the same judge. Not safe for several threads."""

    def __init__(self, directory: Path, judge: str) -> None:
        self.directory, self._owner = directory, f"{os.getpid()}-{uuid.uuid4().hex[:8]}"
        self._judge = hashlib.blake2b(judge.encode(), digest_size=6).hexdigest()
        self._others, self._read_at = UsageCount(), -REFRESH_SECONDS

    @property
    def path(self) -> Path:
        return self.directory / f"{self._judge}-{self._owner}.json"

    def write(self, count: UsageCount) -> None:
        """Replace the file of this process."""
        self.directory.mkdir(parents=True, exist_ok=True)
        partial = self.path.with_suffix(f".{threading.get_ident()}.partial")
        partial.write_text(json.dumps(dict(zip(FIELDS, count.values(), strict=True))), encoding="utf-8")
        partial.replace(self.path)

    def read_others(self) -> UsageCount:
        """The sum over all other processes, also over those that have ended; at most a second old."""
        now = time.monotonic()
        if now - self._read_at >= REFRESH_SECONDS:
            paths = [path for path in sorted(self.directory.glob(f"{self._judge}-*.json")) if path != self.path]
            self._others, self._read_at = sum(map(read_count, paths), UsageCount()), now
        return self._others


def read_count(path: Path) -> UsageCount:
    """The count in a file of another process."""
    values = read_json_object(path)
    numbers = [values.get(name) for name in FIELDS]
    if not all(type(x) is int and x >= 0 for x in numbers):
        raise ConfigError(
            f"{path} does not hold the requests and tokens of a judge; remove this file, and lower the budget by what "
            "was spent [TM2307]"
        )
    return UsageCount(*(int(x) for x in numbers if x is not None))
