"""A run: everything the loop needs, built from a configuration or by hand."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ..config.run import Batch, CheckpointConfig, GuardConfig, SampleConfig
from ..data.spec import Dataset
from ..objective import Context, Memory, Objective
from ..pictures import fitted
from ..policy import Policy
from ..randomness import Randomness
from ..reward import Rubric
from ..types import Pictures, PromptBatch
from . import checkpoint
from .engine import Engine
from .evidence import History

AnyObjective = Objective[Any, Any, Any, Any]
LOOK, GUARD = -1, -2  # the steps whose draws samples to look at and to judge use, always the same


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
    batch: Batch = Batch()
    ema: float = 0.0
    checkpoint: CheckpointConfig = CheckpointConfig()
    sample: SampleConfig = SampleConfig()
    guard: GuardConfig = GuardConfig()
    start: int = 0  # steps completed
    note: Mapping[str, Any] = field(default_factory=dict)  # goes into every checkpoint
    whole: bool = field(init=False, default=True)  # no part of a step is done without the rest
    memory: Memory = field(init=False)
    history: History = field(init=False)  # of the guard

    def __post_init__(self) -> None:
        held_out = [name for name, graded in self.rubric.rewards.items() if not graded.weight]
        self.history = History(held_out, self.guard.patience)
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
        """Prompts to look at, always the same; where pictures are learned from, with the picture rewards ask for."""
        if self.objective.consumes is not Pictures or not self.rubric.rewards:
            return self.data.first(count)
        seen = self.data.batch(0, count, 0, 1)
        if not isinstance(seen, Pictures):
            return self.data.first(count)
        pixels = fitted(seen.pixels, *self.policy.model.pixels[2:])
        return PromptBatch(seen.prompts, tuple({"target": picture} for picture in pixels))

    def save(self, step: int) -> Path:
        kept = {"memory": self.memory.state(), "guard": self.history.state()}
        extra = {**self.note, "step": step, "seed": self.seed, **kept}
        best = self.history.best == step
        weights = self.policy.weights
        return checkpoint.save(self.directory, step, self.engine, weights, extra, self.checkpoint, best=best)

    def resume(self, path: Path) -> None:
        """Go on from a checkpoint as if nothing had happened."""
        extra = checkpoint.load(path, self.engine, self.policy.weights)
        self.memory.restore(extra["memory"]) if extra["memory"] else None
        self.history.restore(extra.get("guard", ()))
        self.start = int(extra["step"])

    def shown(self) -> AbstractContextManager[None]:
        """Within the block the network runs on the weights that will be used."""
        averaged = self.sample.use == "ema" and self.ema
        return self.policy.weights.use("ema") if averaged else nullcontext()
