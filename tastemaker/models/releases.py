"""What a model was published as: where its weights are, and what its parts are at small size."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..core.types import Placement
from .pipeline_components import PipelineComponents, weight_sources
from .pretrained import WeightsSource


@dataclass(frozen=True)
class PublishedModel:
    """Where it can be fetched, the usual one first, and the settings of small random parts."""

    known: tuple[WeightsSource, ...]
    small: Mapping[str, Mapping[str, Any]]

    def sources(self, weights: str) -> tuple[WeightsSource, ...]:
        return weight_sources(weights, *self.known)

    def kit(self, weights: str, placement: Placement, seed: int) -> PipelineComponents:
        """Its parts from there, or from a folder that is like the usual one."""
        source = next((source for source in self.known if source.hub == weights), self.known[0])
        return PipelineComponents(weights, source, self.small, placement, seed)
