"""The detector behind `tastemaker evaluate geneval`, and its self-test."""

from __future__ import annotations

from dataclasses import replace

from ..config.validate import build_component
from ..config.yaml_io import parse_yaml
from ..core.registry import ConfigError
from ..core.reward import RewardSpec
from ..core.types import Placement
from ..rewards.backbones.loading import TINY
from ..rewards.geneval import Geneval
from .geneval import GenEvalBenchmarkScorer


def parse_detector(detector: str, *, unchecked: bool) -> Geneval:
    """GenEval's own detector, another by its path or its name on the hub, or with settings: {threshold: 0.4}."""
    if not detector.lstrip().startswith("{"):
        return Geneval(weights=detector or Geneval.weights, trial=not unchecked)
    told = parse_yaml(detector, "--detector")
    spec: RewardSpec = build_component(
        RewardSpec, {"type": "geneval", **(told if isinstance(told, dict) else {})}, "--detector"
    )
    if not isinstance(spec, Geneval):
        raise ConfigError(f"--detector: found '{detector:.60}'; expected settings of GenEval's, as {{threshold: 0.4}}")
    return replace(spec, trial=spec.trial and not unchecked)


def load_referee(spec: Geneval, placement: Placement, *, tiny: bool) -> GenEvalBenchmarkScorer:
    return GenEvalBenchmarkScorer((spec.tiny() if tiny else spec).load(placement), placement.device)


def describe_detector(marker: GenEvalBenchmarkScorer) -> str:
    """Whose detector, for scores by others are not comparable."""
    spec, usual = marker.scorer.spec, Geneval().rules
    told = ["" if spec.trial else ", untried", "" if spec.rules == usual else f", {spec.rules}"]
    told += ["" if spec.colors in (Geneval.colors, TINY) else f", colours {spec.colors}"]
    return f"detector {marker.scorer.sight.detector.variant}{''.join(told)}"
