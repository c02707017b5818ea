"""A run: everything the loop needs, built from a configuration or by hand."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ..config.run import Batch, CheckpointConfig, SampleConfig
from ..data.spec import Dataset
from ..objective import Context, Memory, Objective
from ..policy import Policy
from ..randomness import Randomness
from ..reward import Rubric
from . import checkpoint
from .engine import Engine

AnyObjective = Objective[Any, Any, Any, Any]
LOOK = -1  # the step whose draws samples to look at use, always the same


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
    start: int = 0  # steps completed
    note: Mapping[str, Any] = field(default_factory=dict)  # goes into every checkpoint
    memory: Memory = field(init=False)

    def __post_init__(self) -> None:
        self.memory = self.objective.memory()
        self.engine.prepare(self.policy.weights)

    def context(self, step: int, rows: int) -> Context[Any]:
        """Draws are named by the step and the row's number over all ranks."""
        first = self.engine.comm.rank * rows
        numbers = torch.arange(first, first + rows, device=self.engine.device)
        rng = Randomness(self.seed, step, numbers)
        return Context(self.policy, self.rubric, rng, self.engine.comm, self.memory, chunk=self.batch.rollout)

    def save(self, step: int) -> Path:
        extra = {**self.note, "step": step, "seed": self.seed, "memory": self.memory.state()}
        return checkpoint.save(self.directory, step, self.engine, self.policy.weights, extra, self.checkpoint)

    def resume(self, path: Path) -> None:
        """Go on from a checkpoint as if nothing had happened."""
        extra = checkpoint.load(path, self.engine, self.policy.weights)
        self.memory.restore(extra["memory"]) if extra["memory"] else None
        self.start = int(extra["step"])
