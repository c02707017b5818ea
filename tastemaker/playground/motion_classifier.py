"""Who watches clips: which of the world's motions they show, if any; all frames are seen at once, as channels."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..core.types import Metadata, Prompts
from . import motion
from .blocks import GROUPS, Stem
from .motion import FRAMES, MOTIONS, ROOM, TURNING
from .scenes import SIDE

NO_MOTION = len(MOTIONS)  # what a clip shows that stands still, jumps, or whose things go different ways


class MotionClassifier(nn.Module):
    widths: tuple[int, int, int] = (40, 72, 80)
    tiny: tuple[int, int, int] = (8, 8, 16)

    def __init__(self, widths: tuple[int, int, int] = widths) -> None:
        super().__init__()
        self.stem, self.norm = Stem(widths, 3 * FRAMES), nn.GroupNorm(GROUPS, widths[2])
        self.head = nn.Linear(2 * widths[2], NO_MOTION + 1)

    def features(self, clips: Tensor) -> Tensor:
        """What Frechet distances compare: [N, C] of clips [N, 8, 3, 64, 64]."""
        coarse: Tensor = self.stem(clips.flatten(1, 2))[1]
        return coarse.mean((2, 3))

    def forward(self, clips: Tensor) -> Tensor:
        """Logits of the six motions and of none, for clips [N, 8, 3, 64, 64]: [N, 7]."""
        seen = F.silu(self.norm(self.stem(clips.flatten(1, 2))[1]))
        # The mean says what most things do, the largest whether one of them does something else.
        out: Tensor = self.head(torch.cat([seen.mean((2, 3)), seen.amax((2, 3))], 1))
        return out.float()


def resize_clips(clips: Tensor) -> Tensor:
    """Clips [N, F, 3, H, W] as the watcher looks at them: [N, 8, 3, 64, 64]."""
    if clips.shape[1] < 2:
        raise ValueError("a motion is to be seen, but the clips have one frame; expected two or more")
    if clips.shape[1] != FRAMES:
        picks = torch.linspace(0, clips.shape[1] - 1, FRAMES, device=clips.device).round().long()
        clips = clips[:, picks]
    if clips.shape[-2:] == (SIDE, SIDE):
        return clips
    frames = F.interpolate(clips.flatten(0, 1), size=(SIDE, SIDE), mode="bilinear", antialias=True)
    return frames.view(len(clips), FRAMES, *frames.shape[1:])


def requested_motion(prompts: Prompts, facts: Sequence[Metadata], device: torch.device) -> Tensor:
    """The motion each row is to show, of its facts or of its prompt's ending: [N]."""
    said = [str(fact.get("motion", fact.get("prompt", text))) for text, fact in zip(prompts, facts, strict=True)]
    return motion.parse_motion(said).to(device)


def representative_frame(clips: Tensor, shown: Tensor) -> Tensor:
    """Of each clip the frame in which its things look as in stills, upright and at full size: [N, 1, 3, H, W].

    What turns is upright at first, what grows has grown at last, and what moves is at its place in the middle. Where
    `film` leaves room to move, the frame is seen from nearer, so that things are as large as detectors know them.
    """
    rows, count = torch.arange(len(clips), device=clips.device), clips.shape[1]
    grows = shown == motion.GROWING
    frames = torch.where(shown == TURNING, 0, torch.where(grows, count - 1, count // 2))
    near = torch.where(grows, 1.0, ROOM)
    turn = torch.zeros(len(clips), 2, 3, device=clips.device)
    turn[:, 0, 0], turn[:, 1, 1] = near, near
    picked = clips[rows, frames]
    where = F.affine_grid(turn, list(picked.shape), align_corners=False).to(clips.dtype)
    return F.grid_sample(picked, where, padding_mode="border", align_corners=False)[:, None]
