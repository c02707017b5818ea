"""Pictures from files, in time for whoever looks at them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from torch import Tensor

from ..data.image_io import read_image

NUM_THREADS = 8  # of files at a time


def prefetch_images(shares: Sequence[Sequence[Path]]) -> Iterator[list[Tensor]]:
    """The pictures of some files after those of others; the next are read while somebody looks at these."""
    with ThreadPoolExecutor(NUM_THREADS) as pool:
        coming: list[Future[Tensor]] = []
        for files in [*shares, []]:
            now, coming = coming, [pool.submit(read_image, file) for file in files]
            if now:
                yield [picture.result() for picture in now]
