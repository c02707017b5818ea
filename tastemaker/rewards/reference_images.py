"""Images in the metadata of samples that edits and subjects are compared with: their source or their reference."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ..core.types import Metadata, Prompts
from ..data.metadata_images import read_metadata_images


def reference_images(key: str, prompts: Prompts, metadata: Sequence[Metadata]) -> list[tuple[Tensor, ...]]:
    """The images [3, H, W] in [0, 1] of each sample, from paths or pixels under a key of its metadata; one or several.

    Of a video it is the first frame.
    """
    return [_read_references(key, prompt, entry) for prompt, entry in zip(prompts, metadata, strict=True)]


def _read_references(key: str, prompt: str, metadata: Metadata) -> tuple[Tensor, ...]:
    value = metadata.get(key)
    images = read_metadata_images(value)
    if images is None:
        values = value if isinstance(value, (list, tuple)) else [value]
        found = [list(each.shape) if isinstance(each, Tensor) else type(each).__name__ for each in values]
        raise ValueError(
            f"the prompt '{prompt:.80}' has {found if value is not None else 'no images'} as '{key:.40}' in its "
            "metadata; expected a path, pixels [3, H, W] or [F, 3, H, W] in [0, 1], or a list of those, so add them, "
            "or name another key [TM2120]"
        )
    return images
