"""Who judges in `tastemaker evaluate geneval`: a detector, by name, and whether it was tried."""

from __future__ import annotations

from dataclasses import replace

from ..config.text import parse
from ..config.validate import build
from ..eval.geneval import Referee
from ..registry import ConfigError
from ..reward import RewardSpec
from ..rewards.geneval import Geneval
from ..rewards.nets.hub import TINY
from ..types import Placement


def eyes(detector: str, *, unchecked: bool) -> Geneval:
    """GenEval's own detector, another by its path or its name on the hub, or with settings: {threshold: 0.4}."""
    if not detector.lstrip().startswith("{"):
        return Geneval(weights=detector or Geneval.weights, trial=not unchecked)
    told = parse(detector, "--detector")
    spec: RewardSpec = build(RewardSpec, {"type": "geneval", **(told if isinstance(told, dict) else {})}, "--detector")
    if not isinstance(spec, Geneval):
        raise ConfigError(f"--detector: found '{detector:.60}'; expected settings of GenEval's, as {{threshold: 0.4}}")
    return replace(spec, trial=spec.trial and not unchecked)


def referee(spec: Geneval, placement: Placement, *, tiny: bool) -> Referee:
    return Referee((spec.tiny() if tiny else spec).load(placement), placement.device)


def judged_by(marker: Referee) -> str:
    """Whose detector, for scores by others are not comparable."""
    spec, usual = marker.scorer.spec, Geneval().rules
    told = ["" if spec.trial else ", untried", "" if spec.rules == usual else f", {spec.rules}"]
    told += ["" if spec.colors in (Geneval.colors, TINY) else f", colours {spec.colors}"]
    return f"detector {marker.scorer.sight.detector.variant}{''.join(told)}"
