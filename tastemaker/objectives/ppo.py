"""PPO's clipped surrogate on one segment, for every method that reinforces decisions."""

from __future__ import annotations

import torch
from torch import Tensor

from ..core.types import Segment


def clipped_surrogate(
    log_prob: Tensor, segment: Segment, advantage: Tensor, clip: float, rise: float | None = None
) -> tuple[Tensor, dict[str, Tensor]]:
    """The gain of each decision, at most what a ratio within 1 +- clip earns, or 1 + rise; what to watch: [B, K]."""
    change = log_prob - segment.log_prob
    ratio, advantage = change.exp(), advantage[:, None]
    within = ratio.clamp(1 - clip, 1 + (clip if rise is None else rise))
    gain = torch.minimum(ratio * advantage, within * advantage)
    taken = segment.mask.sum(1).clamp(min=1)

    def mean(x: Tensor) -> Tensor:
        return ((x * segment.mask).sum(1) / taken).detach()

    watched = {
        "ratio": mean(ratio),
        "ratio_off": mean((ratio - 1).abs()),
        "clipped": mean((ratio != within).float()),
    }
    return gain, watched


def count_decisions(segments: tuple[Segment, ...]) -> Tensor:
    """How many decisions each row took in all: [B]."""
    return torch.stack([segment.mask.sum(1) for segment in segments]).sum(0).clamp(min=1)
