"""Which frames of a video are decoded and scored by objectives that back-propagate through the decoder."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from ..core.policy import Policy, Process

# Frames of a video that are decoded and scored: by index, or by name. `random` is one frame per video (VADER's -1),
# `fml` first, middle and last, `alt` every second one.
Frames = Literal["all", "random", "first", "middle", "last", "fml", "alt"] | int | tuple[int, ...]


def frame_indices(frames: Frames) -> tuple[int, ...]:
    """The frames given by index; empty for names."""
    return (frames,) if isinstance(frames, int) else frames if isinstance(frames, tuple) else ()


def validate_frames(frames: Frames) -> None:
    """Refuse an empty list and negative indices."""
    if frames == () or min(frame_indices(frames), default=0) < 0:
        value = list(frames) if isinstance(frames, tuple) else frames
        raise ValueError(
            f"'frames' is {value}; expected frame indices of at least 0, or random (VADER writes random as -1) [TM317]"
        )


def select_frames(frames: Frames, count: int) -> list[int] | None:
    """Indices of the frames of a video with `count` frames; None for all frames and for `random`."""
    indices = frame_indices(frames)
    if max(indices, default=0) >= count:
        raise ValueError(
            f"'frames' has frame {max(indices)} of a video of {count} frames; choose indices below {count} [TM318]"
        )
    if indices:
        return list(dict.fromkeys(indices))
    named = {
        "first": [0],
        "middle": [count // 2],
        "last": [count - 1],
        "fml": sorted({0, count // 2, count - 1}),
        "alt": list(range(0, count, 2 if count > 2 else 1)),  # a single frame would not be a video
    }
    return named.get(str(frames))


def is_single_frame(frames: Frames, count: int) -> bool:
    """Whether only one frame of a video with `count` frames is decoded."""
    indices = select_frames(frames, count)
    return count > 1 and (frames == "random" or (indices is not None and len(indices) == 1))


def decode_frames(policy: Policy[Process], x: Tensor, frames: Frames, uniform: Tensor) -> Tensor:
    """Pixels [B, F, 3, H, W] of the frames chosen; for `random`, one frame per video, chosen by `uniform` [B]."""
    count = policy.model.pixels[0]
    if frames != "random" or count == 1:
        return policy.decode(x, select_frames(frames, count))
    chosen = (uniform * count).long().tolist()
    videos = {frame: [row for row, other in enumerate(chosen) if other == frame] for frame in sorted({*chosen})}
    order = torch.tensor([row for rows in videos.values() for row in rows], device=x.device)
    return torch.cat([policy.decode(x[rows], [frame]) for frame, rows in videos.items()])[order.argsort()]
