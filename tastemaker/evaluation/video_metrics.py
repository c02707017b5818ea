"""PlayEval scores of videos: a held-out detector for the content and a held-out classifier for the motion."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..core.randomness import Randomness
from ..core.types import Metadata, Prompts
from ..playground.caption_encoder import requested_captions
from ..playground.motion import MOTIONS, paint_clips
from ..playground.motion_classifier import MotionClassifier, representative_frame, requested_motion, resize_clips
from ..playground.network_files import TINY, load_network
from ..playground.scenes import Painter, sample_scenes
from .detector_metrics import HELD_OUT_DETECTOR, PlayEvalScorer, load_playeval_scorer

HELD_OUT_MOTION = "playground/motion1"
MOTION_LABELS = (*MOTIONS, "no motion")


@dataclass(frozen=True)
class PlayEvalMotionScorer:
    """Marks clips of the playground."""

    net: MotionClassifier
    eyes: PlayEvalScorer

    @torch.no_grad()
    def mark(self, pixels: Tensor, prompts: Prompts, facts: Sequence[Metadata]) -> list[dict[str, Any]]:
        """Right is a clip that shows the caption, in the frame that can tell, and moves as it says."""
        clips, device = pixels.to(self.eyes.device).float(), self.eyes.device
        wanted = requested_motion(prompts, facts, device)
        sure = self.net(resize_clips(clips)).softmax(1)
        share, seen = sure.gather(1, wanted[:, None])[:, 0].tolist(), sure.argmax(1).tolist()
        told = self.eyes.mark(representative_frame(clips, wanted), prompts, facts)
        rows = zip(told, wanted.tolist(), seen, share, strict=True)
        return [_combine_scores(mark, *motion) for mark, *motion in rows]

    @torch.no_grad()
    def features(self, pixels: Tensor) -> Tensor:
        """What Frechet distances compare: how clips move, and what first, middle and last frames show: [N, C]."""
        clips = resize_clips(pixels.to(self.eyes.device).float())
        frames = clips[:, [0, clips.shape[1] // 2, clips.shape[1] - 1]]
        shown = self.eyes.features(frames.flatten(0, 1)[:, None]).view(*frames.shape[:2], -1)
        return torch.cat([self.net.features(clips).cpu(), shown.mean(1)], 1)

    def real(self, prompts: Prompts, facts: Sequence[Metadata], rows: Sequence[int]) -> Tensor:
        """True clips of the same captions: [N, 8, 3, 64, 64]."""
        device = self.eyes.device
        rng = Randomness(1, 0, torch.tensor(list(rows), device=device))
        scenes = sample_scenes(requested_captions(prompts, facts, device), rng)
        return paint_clips(Painter("noto", device), scenes, requested_motion(prompts, facts, device), rng)


def _combine_scores(mark: dict[str, Any], wanted: int, seen: int, share: float) -> dict[str, Any]:
    """Scores of what a clip shows made scores of that and its motion."""
    right = float(wanted == seen)
    scores = {"strict": mark["strict"] * right, "lenient": mark["lenient"] * right}
    parts = {"graded": (mark["graded"] + share) / 2, "content": mark["strict"], "motion": right}
    reasons = [*mark["reasons"], *([] if right else [f"expected {MOTION_LABELS[wanted]}, found {MOTION_LABELS[seen]}"])]
    return {**scores, **parts, "seen": MOTION_LABELS[seen], "reasons": reasons}


def load_playeval_motion_scorer(
    weights: str = HELD_OUT_DETECTOR, device: torch.device | str = "cpu"
) -> PlayEvalMotionScorer:
    watcher = load_network(MotionClassifier, TINY if weights == TINY else HELD_OUT_MOTION, device)
    return PlayEvalMotionScorer(watcher, load_playeval_scorer(weights, device))
