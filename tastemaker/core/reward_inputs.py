"""Pixels and metadata on their way to rewards: what is refused, what is copied, and videos as frames."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .errors import RewardError
from .text_layout import truncate_text
from .types import Metadata, Prompts


def check_shape(pixels: Tensor) -> None:
    """Refuse pixels that are no batch of images or videos."""
    if pixels.dim() != 5 or pixels.shape[2] != 3 or 0 in pixels.shape[1:]:
        raise ValueError(
            f"rubric: expected pixels of shape [B, F, 3, H, W], got {list(pixels.shape)}; add the missing dimensions "
            "(F is 1 for images) [TM113]"
        )


def sum_samples(pixels: Tensor) -> Tensor:
    """The sum [B] of each sample. It is finite only if all its pixels are, and needs no mask as large as they are."""
    return pixels.detach().sum((1, 2, 3, 4), dtype=torch.float32)


def check_sums(sums: Tensor, prompts: Prompts) -> None:
    """Refuse samples with NaN or infinity, given their sums [B]."""
    rows = (~torch.isfinite(sums)).nonzero().flatten().tolist()
    if rows:
        indices = ", ".join(map(str, rows[:8])) + (", ..." if len(rows) > 8 else "")
        quoted = quote_prompts([prompts[i] for i in rows])
        raise RewardError(
            f"the pixels of sample {indices} contain NaN or infinity (prompts {quoted}), "
            "so no reward was computed. The generator has diverged: lower optim.lr, or resume from an earlier "
            "checkpoint [TM114]"
        )


def quote_prompts(prompts: Sequence[str]) -> list[str]:
    """The beginnings of the first prompts, for a message."""
    return [truncate_text(prompt, 80) for prompt in prompts[:3]]


def frames_as_samples(pixels: Tensor, metadata: Sequence[Metadata]) -> tuple[Tensor, list[Metadata]]:
    """Every frame as a sample [B * F, 1, 3, H, W], frames of a video adjacent; metadata `frame` is its index."""
    frames = pixels.flatten(0, 1)[:, None]
    return frames, [{**entry, "frame": k} for entry in metadata for k in range(pixels.shape[1])]


def copy_metadata(metadata: Sequence[Metadata]) -> list[dict[str, Any]]:
    """Copy metadata with its tensors, arrays, lists and dictionaries.

    What samples share, such as an image, is copied once. Other values, such as images of Pillow, are not copied.
    """
    copies: dict[int, Any] = {}

    def copy(value: Any) -> Any:
        if not isinstance(value, (Tensor, np.ndarray)) and type(value) not in (dict, list, tuple):
            return value
        if id(value) not in copies:
            if isinstance(value, Tensor):
                copies[id(value)] = value.clone()
            elif isinstance(value, np.ndarray):
                copies[id(value)] = value.copy()
            elif isinstance(value, dict):
                copies[id(value)] = {key: copy(inner) for key, inner in value.items()}
            else:
                copies[id(value)] = type(value)(copy(inner) for inner in value)
        return copies[id(value)]

    return [{key: copy(value) for key, value in entry.items()} for entry in metadata]


def metadata_equal(one: Any, other: Any) -> bool:
    """Whether two values of metadata are equal, with their tensors; NaN equals NaN."""
    if isinstance(one, (Tensor, np.ndarray)):
        same, changed = torch.as_tensor(one), torch.as_tensor(other)
        if same.shape != changed.shape or same.dtype != changed.dtype:
            return False
        return bool(((same == changed) | ((same != same) & (changed != changed))).all())
    if isinstance(one, Mapping):
        return one.keys() == other.keys() and all(metadata_equal(value, other[key]) for key, value in one.items())
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(metadata_equal, one, other))
    return one is other or bool(one == other)
