"""Several timesteps of a trajectory in one call of the network: segments side by side in one batch."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from torch import Tensor

from ..core.policy import Process
from ..core.types import Condition, Segment, concatenate
from ..processes.autoregressive import AutoregressiveProcess


def split_timesteps(count: int, per_call: int) -> list[range]:
    """Split the numbers of `count` segments into as few groups of at most `per_call` as possible.

    Sizes differ by at most one, the larger groups first: batches of few shapes need few compiled graphs, and the
    largest one bounds the memory.
    """
    groups = -(-count // per_call)
    starts = [i * (count // groups) + min(i, count % groups) for i in range(groups + 1)] if groups else []
    return [range(start, end) for start, end in pairwise(starts)]


def join_segments(cond: Condition, segments: Sequence[Segment]) -> tuple[Condition, Segment]:
    """All rows of the first segment, then all of the next one, with their conditions: G B rows of G segments."""
    return concatenate([cond] * len(segments)), concatenate(segments)


def sum_groups(rows: Tensor, size: int) -> Tensor:
    """Sum the values of each sample over the segments of a group: [B] of [G B]."""
    return rows.view(size, -1).sum(0)


def average_groups(metrics: dict[str, Tensor], size: int) -> dict[str, Tensor]:
    """Average the metrics of each sample over the segments of a group: [B] of [G B] each."""
    return {name: rows.view(size, -1).mean(0) for name, rows in metrics.items()}


def find_group_problem(process: Process, per_call: int) -> str | None:
    """Why several sampling steps cannot share a call with this process; None if they can."""
    if per_call == 1 or not isinstance(process, AutoregressiveProcess):
        return None
    return (
        f"objective.timesteps_per_call is {per_call}, but all tokens of an autoregressive model are scored in one call "
        "already; set objective.timesteps_per_call=1 [TM2740]"
    )
