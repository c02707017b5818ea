"""Batches of the next steps are loaded in advance, and errors are raised by the batch they belong to."""

from __future__ import annotations

from concurrent.futures import wait
from typing import Any

import pytest

from tastemaker.core.registry import ConfigError
from tastemaker.data.prefetch import BatchShard, Prefetcher, batch_prefetcher


def test_prefetcher_loads_consecutive_steps_in_advance() -> None:
    made: list[int] = []

    def jobs(share: BatchShard) -> list[Any]:
        made.append(share.step)
        return [lambda: (share.step, share.batch_size)] * 2

    ahead = Prefetcher(jobs, list, num_workers=1)

    def settled() -> list[int]:
        wait(ahead.pending.values(), timeout=60)
        return made

    assert ahead.get(BatchShard(0, 2, 0, 1)) == [(0, 2)] * 2 and settled() == [0]
    assert ahead.get(BatchShard(1, 2, 0, 1)) == [(1, 2)] * 2 and settled() == [0, 1, 2, 3]
    assert ahead.get(BatchShard(0, 8, 0, 1)) == [(0, 8)] * 2
    ahead.get(BatchShard(2, 2, 0, 1))
    assert settled() == [0, 1, 2, 3, 0, 4]
    assert ahead.get(BatchShard(9, 2, 0, 1)) == [(9, 2)] * 2 and not ahead.pending


def test_prefetch_errors_are_raised_by_their_batch() -> None:
    def made(share: BatchShard) -> int:
        if share.step == 2:
            raise ConfigError("data: row 5 is broken")
        return share.step

    ahead = batch_prefetcher(made)
    assert [ahead.get(BatchShard(step, 2, 0, 1)) for step in (0, 1)] == [0, 1]
    with pytest.raises(ConfigError, match="row 5 is broken"):
        ahead.get(BatchShard(2, 2, 0, 1))
    assert ahead.get(BatchShard(3, 2, 0, 1)) == 3
