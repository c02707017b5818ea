"""Descriptions of rewards and published weights.

This module imports the standard library only, so that `tastemaker list` needs no torch.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class WeightsSource:
    """Published weights on the Hugging Face hub."""

    hub: str  # owner/name on the hub
    file: str = ""  # the file that is needed; the whole repository if empty
    size: str = "size on its page"
    license: str = "license on its page"
    gated: bool = False  # access must be requested on its page

    def __str__(self) -> str:
        return f"{self.hub}/{self.file}" if self.file else self.hub


@dataclass(frozen=True)
class RewardCard:
    """What to know about a reward before training on it."""

    range: str  # of typical scores
    failure_modes: str  # what raises it without making samples better
    memory: str = "none"  # size of its weights
    sources: tuple[WeightsSource, ...] = ()  # default weights
