"""Fine-tuning of judges (vision-language models), on the same engine, checkpoints and events as generators."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from ..autoencoders.training import fork_named_rng
from ..config.schema import CheckpointConfig, ValidationConfig
from ..core.randomness import Randomness
from ..core.types import Loss, QuestionAnswerBatch, select_rows
from ..core.weights import Weights, ema_decay_warmup
from ..data.spec import Dataset
from ..training import checkpoint
from ..training.async_metrics import is_due
from ..training.engine import Engine
from ..training.events import CheckpointSaved, Event, StepCompleted, TrainingFinished, TrainingStarted
from ..training.failure_checkpoint import save_on_failure
from ..training.loop import AverageMeter, stop_on_signal


@dataclass
class JudgeRun:
    """`weights.net` takes pictures and what is asked of them, and gives the loss of the answers."""

    weights: Weights
    data: Dataset
    engine: Engine
    directory: Path
    steps: int
    held: Dataset | None = None  # answers that nothing is learned from
    validation: ValidationConfig = ValidationConfig()
    rows: int = 64
    microbatch: int | None = None
    seed: int = 0
    ema: float = 0.0
    checkpoint: CheckpointConfig = CheckpointConfig()
    start: int = 0  # steps completed
    note: Mapping[str, Any] = field(default_factory=dict)  # goes into every checkpoint
    whole: bool = field(init=False, default=True)  # no part of a step is done without the rest

    def __post_init__(self) -> None:
        self.engine.prepare(self.weights)

    def loss(self, batch: QuestionAnswerBatch, *, first: bool = False) -> Loss:
        found: Loss = self.weights.net(batch.pixels.to(self.engine.device), batch.asked, first=first)
        return found

    def save(self, step: int) -> Path:
        extra = {**self.note, "step": step, "seed": self.seed}
        return checkpoint.save(self.directory, step, self.engine, self.weights, extra, self.checkpoint)

    def resume(self, path: Path) -> None:
        """Go on from a checkpoint as if nothing had happened."""
        self.start = int(checkpoint.load(path, self.engine, self.weights)["step"])


def train(run: JudgeRun) -> Iterator[Event]:
    """Learn until the last step, telling of each; a signal to stop saves first and ends early."""
    return save_on_failure(run, train_loop(run))


def train_loop(run: JudgeRun) -> Iterator[Event]:
    """Run the training loop without saving a checkpoint when an exception is raised."""
    yield TrainingStarted(run.start, run.steps, run.directory, sum(p.numel() for p in run.weights.trainable().values()))
    with stop_on_signal() as asked:
        for step in range(run.start, run.steps):
            update, done = train_step(run, step), step + 1
            if run.held is not None and is_due(done, run.validation.every, run.steps):
                update = replace(update, metrics={**update.metrics, **validate(run, run.held)})
            yield update
            stop = run.engine.comm.any(asked.is_set())
            if is_due(done, run.checkpoint.every, run.steps) or stop:
                yield CheckpointSaved(done, run.save(done))
            if stop and done < run.steps:
                yield TrainingFinished(done, f"asked to stop after step {done}; the same command goes on from there")
                return
    yield TrainingFinished(run.steps, f"all {run.steps} steps done")


def train_step(run: JudgeRun, step: int) -> StepCompleted:
    """Run one training step: cross-entropy on the answers of a batch."""
    began, engine, means = time.perf_counter(), run.engine, AverageMeter()
    batch: QuestionAnswerBatch = run.data.batch(step, run.rows, engine.comm.rank, engine.comm.world)
    pieces = torch.split(torch.arange(len(batch)), run.microbatch or len(batch))
    first = engine.comm.rank * len(batch)
    rng = Randomness(run.seed, step, torch.arange(first, first + len(batch), device=engine.device))
    run.weights.net.train()
    run.whole = False
    with fork_named_rng(f"{run.seed}/{step}/{engine.comm.rank}", engine.device):
        for piece in pieces:
            with run.weights.dropping(select_rows(rng, piece)):
                with engine.computing(), engine.keeping():
                    loss = run.loss(select_rows(batch, piece))
                engine.backward(loss.rows.sum() / run.rows, last=piece is pieces[-1])
            means.note(loss, 1)
    launched = engine.launch(step)
    if run.ema:
        run.weights.blend("ema", ema_decay_warmup(run.ema, step))
    run.whole = True
    update = launched()
    metrics = {**means.over(engine.comm), "grad_norm": update.grad_norm, "lr": update.lr}
    return StepCompleted(step + 1, metrics, time.perf_counter() - began, run.rows)


@torch.no_grad()
def validate(run: JudgeRun, held: Dataset) -> dict[str, float]:
    """How likely the first word of held-out answers is, and how often the likeliest, by the weights to be used."""
    comm, means = run.engine.comm, AverageMeter()
    # As many to each rank, or one with a piece more would wait for sharded weights that no other gathers.
    share = max(1, min(run.validation.rows, len(held)) // comm.world)
    batch: QuestionAnswerBatch = held.batch(0, share * comm.world, comm.rank, comm.world)
    run.weights.net.eval()
    with run.engine.computing(), run.weights.use("ema") if run.ema else nullcontext():
        for piece in torch.split(torch.arange(len(batch)), run.microbatch or max(1, run.rows // comm.world)):
            means.note(run.loss(select_rows(batch, piece), first=True), 1)
    return {f"validation/{name}": value for name, value in means.over(comm).items()}
