"""Which frames of a clip are decoded and scored."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from ..core.policy import Policy, Process
from ..core.randomness import Randomness

# Pixel frames, whatever a decoder makes of its latents: one of them, several by number, or by what they are. Of each
# clip one of its own is `random`, which VADER writes as -1; `fml` is first, middle and last, `alt` every second one.
Frames = Literal["all", "random", "first", "middle", "last", "fml", "alt"] | int | tuple[int, ...]


def frame_indices(frames: Frames) -> tuple[int, ...]:
    """Those that are named by number."""
    return (frames,) if isinstance(frames, int) else frames if isinstance(frames, tuple) else ()


def validate_frames(frames: Frames) -> None:
    """A sentence about numbers that no clip has."""
    if frames == () or min(frame_indices(frames), default=0) < 0:
        found = list(frames) if isinstance(frames, tuple) else frames
        raise ValueError(f"'frames' is {found}; expected frames from 0, or the word random, which VADER writes as -1")


def select_frames(frames: Frames, count: int) -> list[int] | None:
    """Their numbers in a clip of `count`; None for all of them, and where each clip has one of its own."""
    chosen = frame_indices(frames)
    if max(chosen, default=0) >= count:
        raise ValueError(f"'frames' asks for frame {max(chosen)} of a clip of {count}; ask for one below {count}")
    if chosen:
        return list(dict.fromkeys(chosen))
    places = {
        "first": [0],
        "middle": [count // 2],
        "last": [count - 1],
        "fml": sorted({0, count // 2, count - 1}),
        "alt": list(range(0, count, 2 if count > 2 else 1)),  # a lone frame would be no clip
    }
    return places.get(str(frames))


def is_single_frame(frames: Frames, count: int) -> bool:
    """Whether of clips of `count` frames only one is shown."""
    chosen = select_frames(frames, count)
    return count > 1 and (frames == "random" or (chosen is not None and len(chosen) == 1))


def decode_frames(policy: Policy[Process], x: Tensor, frames: Frames, rng: Randomness, draw: int) -> Tensor:
    """The pixels of those frames: [B, F, 3, H, W]; draws belong to rows, however these are cut."""
    count = policy.model.pixels[0]
    if frames != "random" or count == 1:
        return policy.decode(x, select_frames(frames, count))
    own = (rng.uniform("frame", 1, draw=draw).flatten() * count).long().tolist()
    groups = {frame: [row for row, other in enumerate(own) if other == frame] for frame in sorted({*own})}
    order = torch.tensor([row for rows in groups.values() for row in rows], device=x.device)
    return torch.cat([policy.decode(x[rows], [frame]) for frame, rows in groups.items()])[order.argsort()]
