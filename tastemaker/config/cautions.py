"""What may be done and is rarely meant: said once when a run is built, in a sentence each."""

from __future__ import annotations

import warnings

from ..objectives.forced_grpo import ForcedGRPO
from .run import RunConfig

FAULTS = {
    "sampled_context": "what was drawn by reading the picture is scored by reading the sample",
    "dropout": "what was drawn by the whole network is scored by one with parts left out",
}


def cautions(config: RunConfig) -> list[str]:
    """Every fault of published trainers that is switched on."""
    objective = config.objective
    if not isinstance(objective, ForcedGRPO):
        return []
    why = "so the ratio does not begin at 1; meant to compare with, not to train by"
    return [f"objective.faults: {fault} is on: {FAULTS[fault]}, {why}" for fault in objective.faults]


def warn(config: RunConfig) -> None:
    for caution in cautions(config):
        warnings.warn(caution, stacklevel=2)
