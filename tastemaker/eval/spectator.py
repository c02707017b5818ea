"""PlayEval's examiner of clips: a detector for what they show, a watcher for how it moves; neither is a reward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..playground.motion import MOTIONS, film
from ..playground.reading import asked
from ..playground.scenes import Painter, arrange
from ..playground.trained import TINY, load
from ..playground.watcher import Watcher, asked_motion, sized, telling
from ..randomness import Randomness
from ..types import Facts, Prompts
from .examiner import HELD_OUT, Examiner, examiner

HELD_OUT_MOTION = "playground/motion1"
SEEN = (*MOTIONS, "no motion")


@dataclass(frozen=True)
class Spectator:
    """Marks clips of the playground."""

    net: Watcher
    eyes: Examiner

    @torch.no_grad()
    def mark(self, pixels: Tensor, prompts: Prompts, facts: Sequence[Facts]) -> list[dict[str, Any]]:
        """Right is a clip that shows the caption, in the frame that can tell, and moves as it says."""
        clips, device = pixels.to(self.eyes.device).float(), self.eyes.device
        wanted = asked_motion(prompts, facts, device)
        sure = self.net(sized(clips)).softmax(1)
        share, seen = sure.gather(1, wanted[:, None])[:, 0].tolist(), sure.argmax(1).tolist()
        told = self.eyes.mark(telling(clips, wanted), prompts, facts)
        rows = zip(told, wanted.tolist(), seen, share, strict=True)
        return [_both(mark, *motion) for mark, *motion in rows]

    @torch.no_grad()
    def features(self, pixels: Tensor) -> Tensor:
        """What Frechet distances compare: how clips move, and what first, middle and last frames show: [N, C]."""
        clips = sized(pixels.to(self.eyes.device).float())
        frames = clips[:, [0, clips.shape[1] // 2, clips.shape[1] - 1]]
        shown = self.eyes.features(frames.flatten(0, 1)[:, None]).view(*frames.shape[:2], -1)
        return torch.cat([self.net.features(clips).cpu(), shown.mean(1)], 1)

    def real(self, prompts: Prompts, facts: Sequence[Facts], rows: Sequence[int]) -> Tensor:
        """True clips of the same captions: [N, 8, 3, 64, 64]."""
        device = self.eyes.device
        rng = Randomness(1, 0, torch.tensor(list(rows), device=device))
        scenes = arrange(asked(prompts, facts, device), rng)
        return film(Painter("noto", device), scenes, asked_motion(prompts, facts, device), rng)


def _both(mark: dict[str, Any], wanted: int, seen: int, share: float) -> dict[str, Any]:
    """Scores of what a clip shows made scores of that and its motion."""
    right = float(wanted == seen)
    scores = {"strict": mark["strict"] * right, "lenient": mark["lenient"] * right}
    parts = {"graded": (mark["graded"] + share) / 2, "content": mark["strict"], "motion": right}
    reasons = [*mark["reasons"], *([] if right else [f"expected {SEEN[wanted]}, found {SEEN[seen]}"])]
    return {**scores, **parts, "seen": SEEN[seen], "reasons": reasons}


def spectator(weights: str = HELD_OUT, device: torch.device | str = "cpu") -> Spectator:
    watcher = load(Watcher, TINY if weights == TINY else HELD_OUT_MOTION, device)
    return Spectator(watcher, examiner(weights, device))
