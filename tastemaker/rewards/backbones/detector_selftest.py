"""Self-test of a detector on drawings of known objects and plain colors; refuses detectors that fail it.

Wrong settings, wrong kernels or weights in a wrong order leave a network that runs and finds next to nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ...core.registry import ConfigError
from ...core.types import Placement
from ...evaluation.geneval_rules import CLASSES as NAMES
from ...playground.art import CLASSES, COLORS, sprites
from .geneval_checker import GenevalChecker
from .instance_segmentation import Instances
from .preprocessing import CLIP_MEAN, CLIP_STD

CELL = 128  # pixels of a drawing with what is around it
ACROSS, DOWN = 3, 2  # drawings of a picture
ENOUGH = 8  # of the 48; a network that guesses finds one of eighty
RIGHT = 7  # of the ten colours


@dataclass(frozen=True)
class SelfTestResult:
    """How a trial went."""

    found: int  # drawings known for what they are
    of: int
    colors: int  # plain colours called by their names

    def __str__(self) -> str:
        return f"{self.found} of {self.of} drawings and {self.colors} of {len(COLORS)} colours were known"


def run_selftest(sight: GenevalChecker, placement: Placement) -> SelfTestResult:
    """Show the detector what it must know."""
    found = 0
    for first in range(0, len(CLASSES), ACROSS * DOWN):
        names = CLASSES[first : first + ACROSS * DOWN]
        seen = sight.detector.find(selftest_image(first)[None].to(placement.device), sight.rules.threshold)[0]
        found += sum(_known(seen, name, place) for place, name in enumerate(names))
    return SelfTestResult(found, len(CLASSES), _colors(sight))


def require_selftest(sight: GenevalChecker, placement: Placement) -> SelfTestResult:
    """Refuse to judge by a detector or by colours that fail the trial."""
    outcome = run_selftest(sight, placement)
    if outcome.found < ENOUGH or outcome.colors < RIGHT:
        raise ConfigError(
            f"the detector '{sight.detector.variant}' fails its trial: {outcome}, expected at least {ENOUGH} and "
            f"{RIGHT}; its verdicts would be wrong, so name other weights, or fetch them again"
        )
    return outcome


def selftest_image(first: int) -> Tensor:
    """Six drawings from this one on, before light grey: [3, H, W]."""
    art = sprites("noto")[first : first + ACROSS * DOWN]
    large = F.interpolate(art, (CELL * 3 // 4, CELL * 3 // 4), mode="bicubic", antialias=True).clamp(0, 1)
    margin = CELL // 8
    large = F.pad(large, (margin, margin, margin, margin))
    shown = large[:, :3] * large[:, 3:] + 0.9 * (1 - large[:, 3:])
    cells = shown.view(DOWN, ACROSS, 3, CELL, CELL)
    return cells.permute(2, 0, 3, 1, 4).reshape(3, DOWN * CELL, ACROSS * CELL)


def _known(seen: Instances, name: str, place: int) -> bool:
    """Whether a thing of that name was found about where it was drawn."""
    label = NAMES.index(name)
    centres = (seen.boxes[:, :2] + seen.boxes[:, 2:]) / 2
    column, row = place % ACROSS, place // ACROSS
    inside = (centres // CELL == centres.new_tensor([column, row])).all(1)
    return bool(((seen.label == label) & inside).any())


def _colors(sight: GenevalChecker) -> int:
    """How many plain colours are called by their names."""
    size = sight.tints.size
    mean, std = (torch.tensor(x)[:, None, None] for x in (CLIP_MEAN, CLIP_STD))
    plain = [(torch.tensor(color)[:, None, None].expand(3, size, size) - mean) / std for color in COLORS.values()]
    told = sight.tints.tell(plain, ["car"] * len(plain))
    return sum(name == color for name, color in zip(told, COLORS, strict=True))
