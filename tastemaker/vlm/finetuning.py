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
from ..config.schema import CheckpointConfig, JudgeRunConfig, ValidationConfig
from ..core.randomness import Randomness
from ..core.types import Loss, QuestionAnswerBatch, select_rows
from ..core.weights import Weights, ema_decay_warmup
from ..data.dataset import Dataset
from ..training import checkpoint
from ..training.engine import Engine
from ..training.events import CheckpointSaved, Event, TrainingFinished, TrainingStarted
from ..training.loop import interruption_reason, is_due, save_after_failure, stop_on_signal
from ..training.metrics import AverageMeter, StepMetrics


class JudgeState(checkpoint.ExtraState):
    """What a judge's run keeps in state.json."""

    step: checkpoint.Step


@dataclass
class JudgeRun:
    """State of a run. `weights.net` maps images and conversations to the loss of the answers."""

    weights: Weights
    data: Dataset
    engine: Engine
    directory: Path
    steps: int
    validation_data: Dataset | None = None  # held-out answers
    validation: ValidationConfig = ValidationConfig()
    batch_size: int = 64
    micro_batch_size: int | None = None
    seed: int = 0
    ema_decay: float = 0.0
    checkpoint: CheckpointConfig = CheckpointConfig()
    start_step: int = 0  # steps completed
    checkpoint_metadata: Mapping[str, Any] = field(default_factory=dict)  # saved with every checkpoint
    config: JudgeRunConfig | None = field(init=False, default=None)  # that it was built from, if any
    step_complete: bool = field(init=False, default=True)  # False while a step is under way

    def __post_init__(self) -> None:
        self.engine.prepare(self.weights)

    def loss(self, batch: QuestionAnswerBatch, *, first: bool = False) -> Loss:
        loss: Loss = self.weights.net(batch.pixels.to(self.engine.device), batch.conversations, first=first)
        return loss

    def save(self, step: int) -> Path:
        extra = {**self.checkpoint_metadata, "step": step, "seed": self.seed}
        return checkpoint.save(self.directory, step, self.engine, self.weights, extra, self.checkpoint)

    def resume(self, path: Path) -> None:
        """Continue from a checkpoint, with the same results as without the interruption."""
        self.start_step = int(checkpoint.load(path, self.engine, self.weights, JudgeState)["step"])


def train(run: JudgeRun) -> Iterator[Event]:
    """Train until the last step and yield an event for everything that happens, as `tastemaker.training.loop.train`."""
    done = saved = run.start_step
    yield TrainingStarted(
        run.start_step, run.steps, run.directory, sum(p.numel() for p in run.weights.trainable().values())
    )
    try:
        with stop_on_signal() as stop_requested:
            for step in range(run.start_step, run.steps):
                event, done = train_step(run, step).to_event(), step + 1
                if run.validation_data is not None and is_due(done, run.validation.every, run.steps):
                    event = replace(event, metrics={**event.metrics, **validate(run, run.validation_data)})
                yield event
                stop = run.engine.comm.any(stop_requested.is_set())
                if is_due(done, run.checkpoint.every, run.steps) or stop:
                    yield CheckpointSaved(done, run.save(done))
                    saved = done
                if stop and done < run.steps:
                    yield TrainingFinished(done, interruption_reason(done))
                    return
    except Exception as error:
        yield from save_after_failure(run, error, done, saved)
        raise
    yield TrainingFinished(run.steps, f"all {run.steps} steps done")


def train_step(run: JudgeRun, step: int) -> StepMetrics:
    """Update on the cross-entropy of a batch of answers. Does not wait for the GPU."""
    started, engine, means = time.perf_counter(), run.engine, AverageMeter()
    batch: QuestionAnswerBatch = run.data.batch(step, run.batch_size, engine.comm.rank, engine.comm.world_size)
    micro_batches = torch.split(torch.arange(len(batch)), run.micro_batch_size or len(batch))
    first = engine.comm.rank * len(batch)
    rng = Randomness(run.seed, step, torch.arange(first, first + len(batch), device=engine.device))
    run.weights.net.train()
    run.step_complete = False
    with fork_named_rng(f"{run.seed}/{step}/{engine.comm.rank}", engine.device):
        for indices in micro_batches:
            with run.weights.dropout_masks(select_rows(rng, indices)):
                with engine.autocast(), engine.offload_activations():
                    loss = run.loss(select_rows(batch, indices))
                engine.backward(loss.rows.sum() / run.batch_size, last=indices is micro_batches[-1])
            means.add_loss(loss, 1, "loss")
    update = engine.launch_step(step)
    if run.ema_decay:
        run.weights.update_snapshot("ema", ema_decay_warmup(run.ema_decay, step))
    run.step_complete = True
    return StepMetrics(step + 1, run.batch_size, means.mean(engine.comm), [("grad_norm", update)], update.lr, started)


@torch.no_grad()
def validate(run: JudgeRun, data: Dataset) -> dict[str, float]:
    """Loss and accuracy of the first token of held-out answers, with the EMA weights if there are any."""
    comm, means = run.engine.comm, AverageMeter()
    # The same number on every rank: an extra micro-batch would wait for shards that no other rank gathers.
    per_rank = max(1, min(run.validation.num_samples, len(data)) // comm.world_size)
    batch: QuestionAnswerBatch = data.batch(0, per_rank * comm.world_size, comm.rank, comm.world_size)
    run.weights.net.eval()
    with run.engine.autocast(), run.weights.use("ema") if run.ema_decay else nullcontext():
        size = run.micro_batch_size or max(1, run.batch_size // comm.world_size)
        for indices in torch.split(torch.arange(len(batch)), size):
            means.add_loss(run.loss(select_rows(batch, indices), first=True), 1, "loss")
    return {f"validation/{name}": value for name, value in means.compute(comm).items()}
