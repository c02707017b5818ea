"""PlayEval's examiner: a detector that is no reward, the published rules and the strict ones, and real scenes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .. import geneval
from ..playground.art import CLASSES, COLORS
from ..playground.blocks import still
from ..playground.detector import Detections, Detector, detections
from ..playground.reading import asked
from ..playground.scenes import Painter, arrange
from ..playground.trained import load
from ..playground.verdict import graded, verdict
from ..randomness import Randomness
from ..types import Facts, Prompts

HELD_OUT = "playground/detector1"
TINTS = tuple(COLORS)


@dataclass(frozen=True)
class Examiner:
    """Marks pictures of the playground."""

    net: Detector
    device: torch.device

    @torch.no_grad()
    def mark(self, pixels: Tensor, prompts: Prompts, facts: Sequence[Facts]) -> list[dict[str, Any]]:
        """A row of scores for each picture, with the reasons where it is wrong."""
        captions = asked(prompts, facts, self.device)
        found = detections(self.net(still(pixels.to(self.device).float())))
        columns = {
            "strict": verdict(found, captions, strict=True).tolist(),
            "lenient": verdict(found, captions, strict=False).tolist(),
            "graded": graded(found, captions, strict=True).tolist(),
        }
        seen = listed(found)
        rows = []
        for place, fact in enumerate(captions.facts()):
            scores = {name: values[place] for name, values in columns.items()}
            reasons = geneval.verdict(seen[place], fact, geneval.PLAYEVAL)[1]
            rows.append({**scores, "reasons": reasons})
        return rows

    @torch.no_grad()
    def features(self, pixels: Tensor) -> Tensor:
        """What Frechet distances compare: [N, C]."""
        return self.net.features(still(pixels.to(self.device).float())).cpu()

    def real(self, prompts: Prompts, facts: Sequence[Facts], rows: Sequence[int]) -> Tensor:
        """True scenes of the same captions: [N, 1, 3, 64, 64]."""
        rng = Randomness(1, 0, torch.tensor(list(rows), device=self.device))
        return Painter("noto", self.device).paint(arrange(asked(prompts, facts, self.device), rng), rng)


def examiner(weights: str = HELD_OUT, device: torch.device | str = "cpu") -> Examiner:
    return Examiner(load(Detector, weights, device), torch.device(device))


def listed(found: Detections) -> list[list[geneval.Detection]]:
    """Detections as the rules read them, picture by picture."""
    low, high = (found.centre + sign * found.span / 2 for sign in (-1, 1))
    boxes = torch.cat([low, high], 2).tolist()
    columns = zip(found.kind.tolist(), boxes, found.score.tolist(), found.color.tolist(), strict=True)
    return [
        [
            geneval.Detection(CLASSES[kind], (box[0], box[1], box[2], box[3]), score, TINTS[color - 1])
            for kind, box, score, color in zip(*picture, strict=True)
            if score > 0
        ]
        for picture in columns
    ]
