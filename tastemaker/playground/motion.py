"""Playground clips: eight frames in which all objects move, turn or grow as the caption says."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ..core.randomness import Randomness
from ..core.types import select_rows
from .captions import MOTIONS as MOTIONS
from .scenes import SIDE, Painter, Scenes

FRAMES = 8
ROOM = 0.8  # moving and turning scenes are made smaller about their middle, so that nothing leaves the picture
TRAVEL = (1 - ROOM) * SIDE  # pixels from the first frame to the last
TURN = math.radians(210)  # clockwise, from the first frame to the last; no whole turn, so that the ends differ
SMALL = 0.45  # of the full size, in the first frame of what grows
TURNING, GROWING = MOTIONS.index("turning"), MOTIONS.index("growing")


def sample_motion(rng: Randomness) -> Tensor:
    """A motion a row, each as often as any other, as a place in MOTIONS: [N]."""
    return rng.words("motion", 1)[:, 0] % len(MOTIONS)


def corrupt_motion(motion: Tensor, probability: float, rng: Randomness) -> Tensor:
    """Another motion with a probability: [N]."""
    bad = rng.uniform("spoiled motion", 1)[:, 0] < probability
    further = 1 + rng.words("another motion", 1)[:, 0] % (len(MOTIONS) - 1)
    return torch.where(bad, (motion + further) % len(MOTIONS), motion)


def motion_captions(captions: Sequence[str], motion: Tensor) -> tuple[str, ...]:
    """Captions that say the motion too."""
    return tuple(f"{caption} {MOTIONS[place]}" for caption, place in zip(captions, motion.tolist(), strict=True))


def parse_motion(captions: Sequence[str]) -> Tensor:
    """The motions captions end with: [N]."""
    places = [[place for place, motion in enumerate(MOTIONS) if text.endswith(motion)] for text in captions]
    for text, found in zip(captions, places, strict=True):
        if not found:
            raise ValueError(f"'{text:.80}' says no motion; expected it to end in one of {', '.join(MOTIONS)}")
    return torch.tensor([found[0] for found in places], dtype=torch.int64)


def animate(scenes: Scenes, motion: Tensor, clock: Tensor | None = None) -> tuple[Scenes, Tensor]:
    """Every frame as a scene, those of a clip side by side, and the angles of its things: [N * 8, 4].

    `motion` is one a clip [N] or one a thing [N, 4]; `clock` [N, 8] is how far it is in each frame, from 0 to 1.
    """
    clips = select_rows(scenes, torch.arange(len(scenes), device=motion.device).repeat_interleave(FRAMES))
    motion = motion.view(len(scenes), -1).repeat_interleave(FRAMES, 0)  # [N * 8, 1 or 4]
    steady = torch.linspace(0, 1, FRAMES, device=motion.device).repeat(len(scenes), 1)
    time = (steady if clock is None else clock).reshape(-1, 1)
    grows, turns = motion == GROWING, motion == TURNING
    room = torch.where(grows, 1.0, ROOM)
    ahead = torch.where(motion % 2 == 0, -TRAVEL, TRAVEL) * (time - 0.5)
    x = torch.where(motion < 2, ahead, 0.0) + SIDE / 2 + room * (clips.x - SIDE / 2)
    y = torch.where((motion == 2) | (motion == 3), ahead, 0.0) + SIDE / 2 + room * (clips.y - SIDE / 2)
    size = clips.size * torch.where(grows, SMALL + (1 - SMALL) * time, ROOM)
    return replace(clips, x=x, y=y, size=size), (turns * time * TURN).expand_as(x)


def paint_clips(painter: Painter, scenes: Scenes, motion: Tensor, rng: Randomness) -> Tensor:
    """Clips of scenes before a background that stands still: [N, 8, 3, 64, 64] in [0, 1]."""
    return paint_frames(painter, *animate(scenes, motion), rng)


def paint_frames(painter: Painter, frames: Scenes, angles: Tensor, rng: Randomness) -> Tensor:
    """Clips of what `animate` made: [N, 8, 3, 64, 64] in [0, 1]."""
    background = painter.background(rng).repeat_interleave(FRAMES, 0)
    return painter.over(background, frames, angles).view(len(rng), FRAMES, 3, SIDE, SIDE)
