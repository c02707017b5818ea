"""Batches of the next steps are made beforehand, and what goes wrong then is told when they are asked for."""

from __future__ import annotations

from concurrent.futures import wait
from typing import Any

import pytest

from tastemaker.data.ahead import Ahead, Share, at_once
from tastemaker.registry import ConfigError


def test_the_next_steps_are_made_beforehand_and_a_look_by_the_way_disturbs_nothing() -> None:
    made: list[int] = []

    def jobs(share: Share) -> list[Any]:
        made.append(share.step)
        return [lambda: (share.step, share.size)] * 2

    ahead = Ahead(jobs, list, workers=1)

    def settled() -> list[int]:
        wait(ahead.coming.values(), timeout=10)
        return made

    assert ahead.take(Share(0, 2, 0, 1)) == [(0, 2)] * 2 and settled() == [0]
    assert ahead.take(Share(1, 2, 0, 1)) == [(1, 2)] * 2 and settled() == [0, 1, 2, 3]
    assert ahead.take(Share(0, 8, 0, 1)) == [(0, 8)] * 2
    ahead.take(Share(2, 2, 0, 1))
    assert settled() == [0, 1, 2, 3, 0, 4]
    assert ahead.take(Share(9, 2, 0, 1)) == [(9, 2)] * 2 and not ahead.coming


def test_what_goes_wrong_beforehand_is_told_when_the_batch_is_asked_for() -> None:
    def made(share: Share) -> int:
        if share.step == 2:
            raise ConfigError("data: row 5 is broken")
        return share.step

    ahead = at_once(made)
    assert [ahead.take(Share(step, 2, 0, 1)) for step in (0, 1)] == [0, 1]
    with pytest.raises(ConfigError, match="row 5 is broken"):
        ahead.take(Share(2, 2, 0, 1))
    assert ahead.take(Share(3, 2, 0, 1)) == 3
