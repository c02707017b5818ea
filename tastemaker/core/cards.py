"""What to know about a reward and about published weights before loading them.

Plain data that imports the standard library alone, so that `tastemaker list` needs no torch.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class WeightsSource:
    """Where published weights come from, and what to know before fetching them."""

    hub: str  # owner/name on the hub
    file: str = ""  # the one that is needed; the whole repository if empty
    size: str = "of a size its page tells"
    licence: str = "under a licence its page tells"
    gated: bool = False  # to be asked for on its page first

    def __str__(self) -> str:
        return f"{self.hub}/{self.file}" if self.file else self.hub


@dataclass(frozen=True)
class RewardCard:
    """What to know of a reward before trusting it."""

    range: str  # of usual scores
    hacked_by: str  # what earns it without being better
    memory: str = "none"  # of its weights
    sources: tuple[WeightsSource, ...] = ()  # of its weights, by default
