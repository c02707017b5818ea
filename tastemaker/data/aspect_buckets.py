"""Sizes that pictures of many proportions are brought to, so that those of one size can be learned from together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache

from .sampler import epoch_permutation

Size = tuple[int, int]  # height, width

STEP, LONGEST = 64, 1024
PROPORTIONS = ((16, 9), (4, 3), (1, 1), (3, 4), (9, 16), (3, 2), (2, 3))  # width and height
AREA = 0.6  # how much a change of area counts beside one of proportions
LARGEST, SMALLEST = 4.0, 0.1  # shares of the picture's area that a bucket may have


@cache
def default_buckets() -> tuple[Size, ...]:
    """Those of SRPO: of each proportion, every size on a grid of 64 pixels up to 1024 a side."""
    return tuple(dict.fromkeys(size for wide, high in PROPORTIONS for size in bucket_sizes(wide, high)))


def bucket_sizes(wide: int, high: int) -> Iterator[Size]:
    for longer in range(STEP, LONGEST + 1, STEP):
        shorter = max(STEP, round(longer * min(wide, high) / max(wide, high) / STEP) * STEP)
        yield (shorter, longer) if wide >= high else (longer, shorter)


def nearest_bucket(height: int, width: int, buckets: Sequence[Size]) -> Size:
    """The bucket that changes proportions and area the least; one far from the area only if all are."""

    def share(bucket: Size) -> float:
        return bucket[0] * bucket[1] / (height * width)

    def change(bucket: Size) -> float:
        return abs(width / height - bucket[1] / bucket[0]) + AREA * abs(1 - share(bucket))

    fitting = [bucket for bucket in buckets if SMALLEST <= share(bucket) <= LARGEST]
    return min(fitting or buckets, key=change)


def schedule_bucket(counts: Sequence[int], seed: int, step: int, size: int) -> tuple[int, list[int]]:
    """Which bucket a step takes, and which `size` of its rows; in every epoch all rows of all buckets have their turn.

    The last step of a bucket is filled up with rows of the same one.
    """
    ends = [sum(-(-count // size) for count in counts[: i + 1]) for i in range(len(counts))]
    epoch, place = divmod(step, ends[-1])
    block = int(epoch_permutation(ends[-1], seed, epoch)[place])
    bucket = next(i for i, end in enumerate(ends) if block < end)
    first = (block - (ends[bucket - 1] if bucket else 0)) * size
    order = epoch_permutation(counts[bucket], seed, epoch)
    return bucket, [int(order[row % counts[bucket]]) for row in range(first, first + size)]
