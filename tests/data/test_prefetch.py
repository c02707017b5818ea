"""Batches of the next steps are made beforehand, and what goes wrong then is told when they are asked for."""

from __future__ import annotations

from concurrent.futures import wait
from typing import Any

import pytest

from tastemaker.core.registry import ConfigError
from tastemaker.data.prefetch import BatchShard, Prefetcher, whole_batch_prefetcher


def test_the_next_steps_are_made_beforehand_and_a_look_by_the_way_disturbs_nothing() -> None:
    made: list[int] = []

    def jobs(share: BatchShard) -> list[Any]:
        made.append(share.step)
        return [lambda: (share.step, share.size)] * 2

    ahead = Prefetcher(jobs, list, workers=1)

    def settled() -> list[int]:
        wait(ahead.coming.values(), timeout=10)
        return made

    assert ahead.take(BatchShard(0, 2, 0, 1)) == [(0, 2)] * 2 and settled() == [0]
    assert ahead.take(BatchShard(1, 2, 0, 1)) == [(1, 2)] * 2 and settled() == [0, 1, 2, 3]
    assert ahead.take(BatchShard(0, 8, 0, 1)) == [(0, 8)] * 2
    ahead.take(BatchShard(2, 2, 0, 1))
    assert settled() == [0, 1, 2, 3, 0, 4]
    assert ahead.take(BatchShard(9, 2, 0, 1)) == [(9, 2)] * 2 and not ahead.coming


def test_what_goes_wrong_beforehand_is_told_when_the_batch_is_asked_for() -> None:
    def made(share: BatchShard) -> int:
        if share.step == 2:
            raise ConfigError("data: row 5 is broken")
        return share.step

    ahead = whole_batch_prefetcher(made)
    assert [ahead.take(BatchShard(step, 2, 0, 1)) for step in (0, 1)] == [0, 1]
    with pytest.raises(ConfigError, match="row 5 is broken"):
        ahead.take(BatchShard(2, 2, 0, 1))
    assert ahead.take(BatchShard(3, 2, 0, 1)) == 3
