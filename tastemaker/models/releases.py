"""What a model was published as: where its weights are, and what its parts are at small size."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..pretrained import Source
from ..types import Placement
from .published import Kit, sources


@dataclass(frozen=True)
class Release:
    """Where it can be fetched, the usual one first, and the settings of small random parts."""

    known: tuple[Source, ...]
    small: Mapping[str, Mapping[str, Any]]

    def sources(self, weights: str) -> tuple[Source, ...]:
        return sources(weights, *self.known)

    def kit(self, weights: str, placement: Placement, seed: int) -> Kit:
        """Its parts from there, or from a folder that is like the usual one."""
        source = next((source for source in self.known if source.hub == weights), self.known[0])
        return Kit(weights, source, self.small, placement, seed)
