"""A run: everything the loop needs, built from a configuration or by hand."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ..config.schema import BatchConfig, CheckpointConfig, GuardConfig, SampleConfig
from ..core.objective import Context, Objective, ObjectiveState
from ..core.policy import Policy
from ..core.randomness import Randomness
from ..core.reward import Rubric
from ..core.types import ImageBatch, PromptBatch
from ..data.image_io import resize_area
from ..data.spec import Dataset
from . import checkpoint
from .drift_statistics import GuardHistory
from .engine import Engine

AnyObjective = Objective[Any, Any, Any, Any]
SAMPLE_STEP, GUARD_STEP = -1, -2  # the steps whose draws samples to look at and to judge use, always the same


@dataclass
class Run:
    policy: Policy[Any]
    objective: AnyObjective
    rubric: Rubric
    data: Dataset
    engine: Engine
    directory: Path
    steps: int
    seed: int = 0
    batch: BatchConfig = BatchConfig()
    ema: float = 0.0
    checkpoint: CheckpointConfig = CheckpointConfig()
    sample: SampleConfig = SampleConfig()
    guard: GuardConfig = GuardConfig()
    start: int = 0  # steps completed
    note: Mapping[str, Any] = field(default_factory=dict)  # goes into every checkpoint
    whole: bool = field(init=False, default=True)  # no part of a step is done without the rest
    memory: ObjectiveState = field(init=False)
    history: GuardHistory = field(init=False)  # of the guard

    def __post_init__(self) -> None:
        held_out = [name for name, graded in self.rubric.rewards.items() if not graded.weight]
        self.history = GuardHistory(held_out, self.guard.patience)
        self.memory = self.objective.memory()
        self.engine.prepare(self.policy.weights)

    def context(self, step: int, rows: int) -> Context[Any]:
        """Draws are named by the step and the row's number over all ranks."""
        first = self.engine.rows.rank * rows
        numbers = torch.arange(first, first + rows, device=self.engine.device)
        rng = Randomness(self.seed, step, numbers)
        held = (self.engine.rows, self.memory)
        return Context(self.policy, self.rubric.for_training(), rng, *held, chunk=self.batch.rollout, first=first)

    def asked(self, count: int) -> PromptBatch:
        """Return fixed prompts for samples and guard; for image datasets, with the target image in their metadata."""
        if self.objective.consumes is not ImageBatch or not self.rubric.rewards:
            return self.data.first(count)
        seen = self.data.batch(0, count, 0, 1)
        if not isinstance(seen, ImageBatch):
            return self.data.first(count)
        pixels = resize_area(seen.pixels, *self.policy.model.pixels[2:])
        return PromptBatch(seen.prompts, tuple({"target": picture} for picture in pixels))

    def save(self, step: int) -> Path:
        kept = {"memory": self.memory.state(), "guard": self.history.state()}
        extra = {**self.note, "step": step, "seed": self.seed, **kept}
        best = self.history.best == step
        weights = self.policy.weights
        return checkpoint.save(self.directory, step, self.engine, weights, extra, self.checkpoint, best=best)

    def resume(self, path: Path) -> None:
        """Restore weights, optimizer, objective and guard state from a checkpoint."""
        extra = checkpoint.load(path, self.engine, self.policy.weights)
        self.memory.restore(extra["memory"]) if extra["memory"] else None
        self.history.restore(extra.get("guard", ()))
        self.start = int(extra["step"])

    def shown(self) -> AbstractContextManager[None]:
        """Use the EMA weights within the block if `sample.use` is ema."""
        averaged = self.sample.use == "ema" and self.ema
        return self.policy.weights.use("ema") if averaged else nullcontext()
