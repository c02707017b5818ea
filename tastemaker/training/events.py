"""Events that the training loop yields to loggers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor


@dataclass(frozen=True)
class Event:
    step: int  # optimisation steps completed


@dataclass(frozen=True)
class TrainingStarted(Event):
    """The run begins, or goes on from `step`."""

    steps: int  # to complete in all
    directory: Path
    parameters: int  # that train


@dataclass(frozen=True)
class StepCompleted(Event):
    """One training step is done. Metrics are means over all ranks."""

    metrics: Mapping[str, float]  # loss, grad_norm, lr, reward, reward/<name>, kl, ...
    seconds: float
    samples: int  # made in this step, over all ranks


@dataclass(frozen=True)
class SamplesGenerated(Event):
    """Samples of fixed prompts and seeds, to look at."""

    prompts: tuple[str, ...]
    pixels: Tensor  # [B, F, 3, H, W] in [0, 1], on the host
    scores: Mapping[str, float]  # mean of each reward over them


@dataclass(frozen=True)
class GuardChecked(Event):
    """Metrics on fixed prompts, checked for signs of reward hacking."""

    metrics: Mapping[str, float]  # reward, reward/<name> with those held out, diversity, variety, features of pictures
    warning: str | None  # what speaks for reward hacking


@dataclass(frozen=True)
class CheckpointSaved(Event):
    path: Path


@dataclass(frozen=True)
class TrainingFinished(Event):
    """The end, or an interruption that can be resumed."""

    reason: str
