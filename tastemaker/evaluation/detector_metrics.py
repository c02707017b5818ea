"""PlayEval scores: a held-out detector with GenEval's rules and stricter ones, and real scenes to compare with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..core.randomness import Randomness
from ..core.types import Metadata, Prompts
from ..playground.art import CLASSES, COLORS
from ..playground.blocks import first_frame
from ..playground.caption_encoder import requested_captions
from ..playground.detector import Detections, SceneDetector, decode_detections
from ..playground.network_files import load_network
from ..playground.scenes import Painter, sample_scenes
from ..playground.verdict import partial_credit, verdict
from . import geneval_rules

HELD_OUT_DETECTOR = "playground/detector1"
COLOR_NAMES = tuple(COLORS)


@dataclass(frozen=True)
class PlayEvalScorer:
    """Marks pictures of the playground."""

    net: SceneDetector
    device: torch.device

    @torch.no_grad()
    def mark(self, pixels: Tensor, prompts: Prompts, facts: Sequence[Metadata]) -> list[dict[str, Any]]:
        """A row of scores for each picture, with the reasons where it is wrong."""
        captions = requested_captions(prompts, facts, self.device)
        found = decode_detections(self.net(first_frame(pixels.to(self.device).float())))
        columns = {
            "strict": verdict(found, captions, strict=True).tolist(),
            "lenient": verdict(found, captions, strict=False).tolist(),
            "graded": partial_credit(found, captions, strict=True).tolist(),
        }
        seen = list_detections(found)
        rows = []
        for place, fact in enumerate(captions.facts()):
            scores = {name: values[place] for name, values in columns.items()}
            reasons = geneval_rules.evaluate_detections(seen[place], fact, geneval_rules.PLAYEVAL)[1]
            rows.append({**scores, "reasons": reasons})
        return rows

    @torch.no_grad()
    def features(self, pixels: Tensor) -> Tensor:
        """What Frechet distances compare: [N, C]."""
        return self.net.features(first_frame(pixels.to(self.device).float())).cpu()

    def real(self, prompts: Prompts, facts: Sequence[Metadata], rows: Sequence[int]) -> Tensor:
        """True scenes of the same captions: [N, 1, 3, 64, 64]."""
        rng = Randomness(1, 0, torch.tensor(list(rows), device=self.device))
        return Painter("noto", self.device).paint(
            sample_scenes(requested_captions(prompts, facts, self.device), rng), rng
        )


def load_playeval_scorer(weights: str = HELD_OUT_DETECTOR, device: torch.device | str = "cpu") -> PlayEvalScorer:
    return PlayEvalScorer(load_network(SceneDetector, weights, device), torch.device(device))


def list_detections(found: Detections) -> list[list[geneval_rules.DetectedObject]]:
    """Detections as the rules read them, picture by picture."""
    low, high = (found.centre + sign * found.span / 2 for sign in (-1, 1))
    boxes = torch.cat([low, high], 2).tolist()
    columns = zip(found.kind.tolist(), boxes, found.score.tolist(), found.color.tolist(), strict=True)
    return [
        [
            geneval_rules.DetectedObject(CLASSES[kind], (box[0], box[1], box[2], box[3]), score, COLOR_NAMES[color - 1])
            for kind, box, score, color in zip(*picture, strict=True)
            if score > 0
        ]
        for picture in columns
    ]
