"""Teaching of judges: the same engine, checkpoints and events as for generators, with answers to give."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from ..config.run import CheckpointConfig, Validation
from ..data.spec import Dataset
from ..randomness import Randomness
from ..types import Answers, Loss, index
from ..weights import Weights, warm
from . import checkpoint
from .autoencoder import seeded
from .engine import Engine
from .events import Event, Finished, Saved, Started, Updated
from .loop import Means, asked_to_stop
from .rescue import rescued
from .telling import due


@dataclass
class JudgeRun:
    """`weights.net` takes pictures and what is asked of them, and gives the loss of the answers."""

    weights: Weights
    data: Dataset
    engine: Engine
    directory: Path
    steps: int
    held: Dataset | None = None  # answers that nothing is learned from
    validation: Validation = Validation()
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

    def loss(self, batch: Answers, *, first: bool = False) -> Loss:
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
    return rescued(run, learning(run))


def learning(run: JudgeRun) -> Iterator[Event]:
    """The same, without saving what a failure would lose."""
    yield Started(run.start, run.steps, run.directory, sum(p.numel() for p in run.weights.trainable().values()))
    with asked_to_stop() as asked:
        for step in range(run.start, run.steps):
            update, done = learn(run, step), step + 1
            if run.held is not None and due(done, run.validation.every, run.steps):
                update = replace(update, metrics={**update.metrics, **validate(run, run.held)})
            yield update
            stop = run.engine.comm.any(asked.is_set())
            if due(done, run.checkpoint.every, run.steps) or stop:
                yield Saved(done, run.save(done))
            if stop and done < run.steps:
                yield Finished(done, f"asked to stop after step {done}; the same command goes on from there")
                return
    yield Finished(run.steps, f"all {run.steps} steps done")


def learn(run: JudgeRun, step: int) -> Updated:
    """One step: give the answers of a batch, and pay for those that were unlikely."""
    began, engine, means = time.perf_counter(), run.engine, Means()
    batch: Answers = run.data.batch(step, run.rows, engine.comm.rank, engine.comm.world)
    pieces = torch.split(torch.arange(len(batch)), run.microbatch or len(batch))
    first = engine.comm.rank * len(batch)
    rng = Randomness(run.seed, step, torch.arange(first, first + len(batch), device=engine.device))
    run.weights.net.train()
    run.whole = False
    with seeded(f"{run.seed}/{step}/{engine.comm.rank}", engine.device):
        for piece in pieces:
            with run.weights.dropping(index(rng, piece)):
                with engine.computing(), engine.keeping():
                    loss = run.loss(index(batch, piece))
                engine.backward(loss.rows.sum() / run.rows, last=piece is pieces[-1])
            means.note(loss, 1)
    launched = engine.launch(step)
    if run.ema:
        run.weights.blend("ema", warm(run.ema, step))
    run.whole = True
    update = launched()
    metrics = {**means.over(engine.comm), "grad_norm": update.grad_norm, "lr": update.lr}
    return Updated(step + 1, metrics, time.perf_counter() - began, run.rows)


@torch.no_grad()
def validate(run: JudgeRun, held: Dataset) -> dict[str, float]:
    """How likely the first word of held-out answers is, and how often the likeliest, by the weights to be used."""
    comm, means = run.engine.comm, Means()
    # As many to each rank, or one with a piece more would wait for sharded weights that no other gathers.
    share = max(1, min(run.validation.rows, len(held)) // comm.world)
    batch: Answers = held.batch(0, share * comm.world, comm.rank, comm.world)
    run.weights.net.eval()
    with run.engine.computing(), run.weights.use("ema") if run.ema else nullcontext():
        for piece in torch.split(torch.arange(len(batch)), run.microbatch or max(1, run.rows // comm.world)):
            means.note(run.loss(index(batch, piece), first=True), 1)
    return {f"validation/{name}": value for name, value in means.over(comm).items()}
