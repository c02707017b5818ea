"""Pictures from files, in time for whoever looks at them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from torch import Tensor

from ..pictures import read_picture

READERS = 8  # of files at a time


def read_ahead(shares: Sequence[Sequence[Path]]) -> Iterator[list[Tensor]]:
    """The pictures of some files after those of others; the next are read while somebody looks at these."""
    with ThreadPoolExecutor(READERS) as pool:
        coming: list[Future[Tensor]] = []
        for files in [*shares, []]:
            now, coming = coming, [pool.submit(read_picture, file) for file in files]
            if now:
                yield [picture.result() for picture in now]
