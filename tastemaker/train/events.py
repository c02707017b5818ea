"""What a run tells those who watch it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor


@dataclass(frozen=True)
class Event:
    step: int  # optimisation steps completed


@dataclass(frozen=True)
class Started(Event):
    """The run begins, or goes on from `step`."""

    steps: int  # to complete in all
    directory: Path
    parameters: int  # that train


@dataclass(frozen=True)
class Updated(Event):
    """One step: experience gathered and learned from. Metrics are means over all ranks."""

    metrics: Mapping[str, float]  # loss, grad_norm, lr, reward, reward/<name>, kl, ...
    seconds: float
    samples: int  # made in this step, over all ranks


@dataclass(frozen=True)
class Sampled(Event):
    """Samples of fixed prompts and seeds, to look at."""

    prompts: tuple[str, ...]
    pixels: Tensor  # [B, F, 3, H, W] in [0, 1], on the host
    scores: Mapping[str, float]  # mean of each reward over them


@dataclass(frozen=True)
class Guarded(Event):
    """A look at fixed prompts for signs of reward hacking."""

    metrics: Mapping[str, float]  # reward, reward/<name> with those held out, diversity, variety, features of pictures
    warning: str | None  # what speaks for reward hacking


@dataclass(frozen=True)
class Saved(Event):
    path: Path


@dataclass(frozen=True)
class Finished(Event):
    """The end, or an interruption that can be resumed."""

    reason: str
