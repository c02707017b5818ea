"""Where Direct-Align enters and lands: the index arithmetic of SRPO's training grid."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Branch = Literal["denoise", "inversion"]


@dataclass(frozen=True)
class BranchLevels:
    """Where a branch enters and lands, and how its reward counts; one value a row: [B]."""

    source: Tensor
    target: Tensor
    boost: Tensor  # by how much praise weighs more than blame
    weight: Tensor  # of the whole


@dataclass(frozen=True)
class TrainingGrid:
    """Evenly spaced levels from a noisy one down to a less noisy one; places count from the latter."""

    noisiest: float
    cleanest: float
    length: int
    stride: int  # the longest

    def reach(self, place: Tensor) -> Tensor:
        """How far a step from there may go without leaving the grid: [B]."""
        room = torch.minimum(self.length - place, place)
        return torch.minimum(room, torch.full_like(place, self.stride))

    def between(self, place: Tensor, reach: Tensor, branch: Branch) -> tuple[Tensor, Tensor, Tensor]:
        """Source, target and the index that rewards count by; both branches land on (nearly) the same level."""
        points = torch.linspace(self.noisiest, self.cleanest, self.length).to(place.device)
        at = place if branch == "denoise" else (place - reach).clamp(min=1)
        high, low = points[self.length - (at + reach).clamp(max=self.length)], points[self.length - at]
        return (high, low, at) if branch == "denoise" else (low, high, at)


def level_weights(share: Tensor, shift: float | None) -> Tensor:
    """From nought where nothing is hidden to one where all is, bent upwards by a shift; ones without."""
    return torch.ones_like(share) if shift is None else shift * share / (1 + (shift - 1) * share)
