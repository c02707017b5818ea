"""Images in the metadata of samples that edits and subjects are compared with: their source or their reference."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

from torch import Tensor

from ..core.types import Metadata, Prompts
from ..data.image_io import read_image


def reference_images(key: str, prompts: Prompts, metadata: Sequence[Metadata]) -> list[tuple[Tensor, ...]]:
    """The images [3, H, W] in [0, 1] of each sample, from paths or pixels under a key of its metadata; one or several.

    Of a video it is the first frame.
    """
    return [_read_references(key, prompt, entry) for prompt, entry in zip(prompts, metadata, strict=True)]


def _read_references(key: str, prompt: str, metadata: Metadata) -> tuple[Tensor, ...]:
    value = metadata.get(key)
    values = value if isinstance(value, (list, tuple)) else [value]
    images = [_read(Path(each)) if isinstance(each, (str, Path)) else each for each in values]
    pixels = [each for each in images if isinstance(each, Tensor) and each.ndim in (3, 4) and each.shape[-3] == 3]
    if not pixels or len(pixels) < len(images):
        found = [list(each.shape) if isinstance(each, Tensor) else type(each).__name__ for each in images]
        raise ValueError(
            f"the prompt '{prompt:.80}' has {found if value is not None else 'no images'} as '{key:.40}' in its "
            "metadata; expected a path, pixels [3, H, W] or [F, 3, H, W] in [0, 1], or a list of those, so add them, "
            "or name another key [TM2120]"
        )
    return tuple(each if each.ndim == 3 else each[0] for each in pixels)


@lru_cache(maxsize=64)
def _read(path: Path) -> Tensor:
    return read_image(path)
