"""Events that the training loop yields to loggers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor


@dataclass(frozen=True)
class Event:
    """Something that happened in a run."""

    step: int  # training steps completed


@dataclass(frozen=True)
class TrainingStarted(Event):
    """Training starts, or resumes at `step`."""

    steps: int  # in all
    directory: Path
    trainable_parameters: int
    notes: tuple[str, ...] = ()  # about the settings, such as a guard without a held-out reward


@dataclass(frozen=True)
class StepCompleted(Event):
    """One training step is done."""

    metrics: Mapping[str, float]  # means over all ranks: loss/policy, reward/mean, rewards/NAME, kl, grad_norm, lr, ...
    seconds: float
    samples: int  # over all ranks
    timings: Mapping[str, float] = field(default_factory=dict)  # seconds of time/rollout, time/reward …

    @property
    def samples_per_second(self) -> float:
        return self.samples / max(self.seconds, 1e-9)

    def scalars(self) -> dict[str, float]:
        """Return everything to log for this step: metrics, timings and throughput."""
        speed = {"time/step": self.seconds, "samples_per_second": self.samples_per_second}
        return {**self.metrics, **self.timings, **speed}


@dataclass(frozen=True)
class SamplesGenerated(Event):
    """Samples from fixed prompts and seeds."""

    prompts: tuple[str, ...]
    pixels: Tensor  # [B, F, 3, H, W] in [0, 1], on the CPU
    scores: Mapping[str, float]  # mean of each reward over them
    sources: Tensor | None = None  # [B, S, 3, H, W] the images that prompts are about, white where there are fewer

    def pixels_with_sources(self) -> Tensor:
        """Return the samples with their sources to the left: [B, F, 3, H, (S + 1) W]."""
        if self.sources is None:
            return self.pixels
        strip = torch.cat(self.sources.unbind(1), -1)[:, None]  # [B, 1, 3, H, S W]
        return torch.cat([strip.expand(-1, self.pixels.shape[1], -1, -1, -1), self.pixels], -1)


@dataclass(frozen=True)
class GuardChecked(Event):
    """Metrics on fixed prompts, checked for signs of reward hacking."""

    metrics: Mapping[str, float]  # reward/mean, rewards/NAME (with held-out rewards), diversity, image statistics, ...
    warning: str | None  # the evidence for reward hacking, if there is any


@dataclass(frozen=True)
class CheckpointSaved(Event):
    """A checkpoint was written."""

    path: Path


@dataclass(frozen=True)
class TrainingFinished(Event):
    """Training ended: all steps are done, or it was interrupted and can be resumed."""

    reason: str
