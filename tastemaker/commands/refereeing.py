"""Who judges in `tastemaker evaluate geneval`: a detector, by name, and whether it was tried."""

from __future__ import annotations

from ..eval.geneval import Referee
from ..rewards.geneval import Geneval
from ..types import Placement


def eyes(detector: str, *, unchecked: bool) -> Geneval:
    """GenEval's own detector, or another by its path or its name on the hub."""
    return Geneval(weights=detector or Geneval.weights, trial=not unchecked)


def referee(spec: Geneval, placement: Placement, *, tiny: bool) -> Referee:
    return Referee((spec.tiny() if tiny else spec).load(placement), placement.device)


def judged_by(marker: Referee) -> str:
    """Whose detector, for scores by others are not comparable."""
    tried = marker.scorer.spec.trial
    return f"detector {marker.scorer.sight.detector.variant}{'' if tried else ', untried'}"
