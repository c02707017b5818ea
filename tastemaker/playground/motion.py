"""Playground videos: eight frames in which all objects move, turn or grow, and a classifier of these motions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..core.randomness import Randomness
from ..core.types import Metadata, Prompts, select_rows
from .captions import MOTIONS as MOTIONS
from .networks import GROUPS, Stem
from .purposes import PlaygroundPurpose
from .scenes import SIDE, Painter, Scenes

FRAMES = 8
ROOM = 0.8  # scale of moving and turning scenes about the center, so that objects stay in the frame
TRAVEL = (1 - ROOM) * SIDE  # pixels from the first frame to the last
TURN = math.radians(210)  # clockwise, from the first frame to the last; no whole turn, so that the ends differ
SMALL = 0.45  # of the full size, in the first frame of what grows
TURNING, GROWING = MOTIONS.index("turning"), MOTIONS.index("growing")


def sample_motion(rng: Randomness) -> Tensor:
    """Sample motions uniformly, as indices into MOTIONS: [N]."""
    return rng.words(PlaygroundPurpose.MOTION, 1)[:, 0] % len(MOTIONS)


def corrupt_motion(motion: Tensor, probability: float, rng: Randomness) -> Tensor:
    """Replace motions by another one with a probability: [N]."""
    bad = rng.uniform(PlaygroundPurpose.CORRUPT_MOTION, 1)[:, 0] < probability
    further = 1 + rng.words(PlaygroundPurpose.WRONG_MOTION, 1)[:, 0] % (len(MOTIONS) - 1)
    return torch.where(bad, (motion + further) % len(MOTIONS), motion)


def motion_captions(captions: Sequence[str], motion: Tensor) -> tuple[str, ...]:
    """Captions with their motion appended."""
    return tuple(f"{caption} {MOTIONS[place]}" for caption, place in zip(captions, motion.tolist(), strict=True))


def parse_motion(captions: Sequence[str]) -> Tensor:
    """The motions at the end of captions: [N]."""
    places = [[place for place, motion in enumerate(MOTIONS) if text.endswith(motion)] for text in captions]
    for text, matches in zip(captions, places, strict=True):
        if not matches:
            raise ValueError(
                f"'{text:.80}' does not describe a motion; end the caption with one of {', '.join(MOTIONS)} [TM758]"
            )
    return torch.tensor([matches[0] for matches in places], dtype=torch.int64)


def animate(scenes: Scenes, motion: Tensor, clock: Tensor | None = None) -> tuple[Scenes, Tensor]:
    """The frames of all videos as scenes [N * 8], and the angles of their objects: [N * 8, 4].

    `motion` is per video [N] or per object [N, 4]; `clock` [N, 8] is the progress of the motion in each frame.
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
    """Videos of scenes on a constant background: [N, 8, 3, 64, 64] in [0, 1]."""
    return paint_frames(painter, *animate(scenes, motion), rng)


def paint_frames(painter: Painter, frames: Scenes, angles: Tensor, rng: Randomness) -> Tensor:
    """Paint the frames of `animate`: [N, 8, 3, 64, 64] in [0, 1]."""
    background = painter.background(rng).repeat_interleave(FRAMES, 0)
    return painter.over(background, frames, angles).view(len(rng), FRAMES, 3, SIDE, SIDE)


NO_MOTION = len(MOTIONS)  # the class of videos that stand still, jump, or whose objects move differently


class MotionClassifier(nn.Module):
    widths: tuple[int, int, int] = (40, 72, 80)
    tiny: tuple[int, int, int] = (8, 8, 16)

    def __init__(self, widths: tuple[int, int, int] = widths) -> None:
        super().__init__()
        self.stem, self.norm = Stem(widths, 3 * FRAMES), nn.GroupNorm(GROUPS, widths[2])
        self.head = nn.Linear(2 * widths[2], NO_MOTION + 1)

    def features(self, clips: Tensor) -> Tensor:
        """Features for Fréchet distances, of videos [N, 8, 3, 64, 64]: [N, C]."""
        coarse: Tensor = self.stem(clips.flatten(1, 2))[1]
        return coarse.mean((2, 3))

    def forward(self, clips: Tensor) -> Tensor:
        """Logits of the six motions and of no motion, for videos [N, 8, 3, 64, 64]: [N, 7]."""
        seen = F.silu(self.norm(self.stem(clips.flatten(1, 2))[1]))
        # The mean shows what most objects do, the maximum whether one of them differs.
        out: Tensor = self.head(torch.cat([seen.mean((2, 3)), seen.amax((2, 3))], 1))
        return out.float()


def resize_clips(clips: Tensor) -> Tensor:
    """Videos [N, F, 3, H, W] at the size of the classifier: [N, 8, 3, 64, 64]."""
    if clips.shape[1] < 2:
        raise ValueError(
            "motion needs videos with at least two frames, got one frame; use a video model, or more frames [TM759]"
        )
    if clips.shape[1] != FRAMES:
        picks = torch.linspace(0, clips.shape[1] - 1, FRAMES, device=clips.device).round().long()
        clips = clips[:, picks]
    if clips.shape[-2:] == (SIDE, SIDE):
        return clips
    frames = F.interpolate(clips.flatten(0, 1), size=(SIDE, SIDE), mode="bilinear", antialias=True)
    return frames.view(len(clips), FRAMES, *frames.shape[1:])


def requested_motion(prompts: Prompts, metadata: Sequence[Metadata], device: torch.device) -> Tensor:
    """The requested motions, from the metadata or the end of the prompts: [N]."""
    texts = [str(known.get("motion", known.get("prompt", text))) for text, known in zip(prompts, metadata, strict=True)]
    return parse_motion(texts).to(device)


def representative_frame(clips: Tensor, shown: Tensor) -> Tensor:
    """The frame of each video in which objects look as in images, upright and at full size: [N, 1, 3, H, W].

    That is the first frame of turning objects, the last one of growing objects, and else the middle one. Scenes that
    `animate` scaled down are enlarged again, so that objects have the size detectors are trained on.
    """
    rows, count = torch.arange(len(clips), device=clips.device), clips.shape[1]
    grows = shown == GROWING
    frames = torch.where(shown == TURNING, 0, torch.where(grows, count - 1, count // 2))
    near = torch.where(grows, 1.0, ROOM)
    turn = torch.zeros(len(clips), 2, 3, device=clips.device)
    turn[:, 0, 0], turn[:, 1, 1] = near, near
    picked = clips[rows, frames]
    where = F.affine_grid(turn, list(picked.shape), align_corners=False).to(clips.dtype)
    return F.grid_sample(picked, where, padding_mode="border", align_corners=False)[:, None]
