"""The training loop: everything that changes a run, in order. Loggers only consume the events it yields."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..core.objective import Comm, Context
from ..core.randomness import Randomness
from ..core.types import ImageBatch, Loss, select_rows
from ..core.weights import ema_decay_warmup
from .async_metrics import AsyncMetrics, PendingMetrics, copy_to_host_async, is_due
from .engine import TrainingError, Update
from .events import (
    CheckpointSaved,
    Event,
    GuardChecked,
    SamplesGenerated,
    StepCompleted,
    TrainingFinished,
    TrainingStarted,
)
from .failure_checkpoint import save_on_failure
from .guard import run_guard
from .run import Run
from .sample_grid import sample_pixels

PendingUpdate = Callable[[], Update]


def train(run: Run) -> Iterator[Event]:
    """Train until the last step and yield an event for each; on SIGTERM or Ctrl-C, save a checkpoint and stop early."""
    return save_on_failure(run, train_loop(run))


def train_loop(run: Run) -> Iterator[Event]:
    """Run the training loop without saving a checkpoint when an exception is raised."""
    yield TrainingStarted(
        run.start, run.steps, run.directory, sum(p.numel() for p in run.policy.weights.trainable().values())
    )
    if run.sample.every and run.start == 0:
        yield generate_samples(run, 0)
    if guard_enabled(run) and not run.history.looks:
        yield run_guard(run, run.start)
    lead = AsyncMetrics(run.engine.leads)
    with stop_on_signal() as asked:
        for step in range(run.start, run.steps):
            done, reason = step + 1, ""
            every = (run.sample.every, run.guard.every if guard_enabled(run) else 0, run.checkpoint.every)
            looked, judged, saved = (is_due(done, often, run.steps) for often in every)
            yield from lead.told(partial(launch_train_step, run, step), now=looked or judged or saved)
            if run.engine.comm.any(asked.is_set()):
                reason = f"asked to stop after step {done}; the same command goes on from there"
                yield from lead.rest()
            if looked:
                yield generate_samples(run, done)
            if judged:
                found = run_guard(run, done)
                yield found
                reason = guard_stop_reason(run, found) or reason
            if saved or reason or run.history.best == done:
                yield CheckpointSaved(done, run.save(done))
            if reason and done < run.steps:
                yield TrainingFinished(done, reason)
                return
    yield TrainingFinished(run.steps, f"all {run.steps} steps done")


def guard_enabled(run: Run) -> bool:
    """Whether there is a guard; without any reward it would have nothing to compare."""
    return bool(run.guard.every and run.rubric.rewards)


def guard_stop_reason(run: Run, found: GuardChecked) -> str:
    """Why the guard ends the run, if it does."""
    if not run.guard.stop or not found.warning:
        return ""
    best = f", and checkpoints/best is step {run.history.best}" if run.history.best else ""
    return f"stopped by the guard after step {found.step}: {found.warning}{best}"


def train_step(run: Run, step: int) -> StepCompleted:
    """Run one training step: collect experience, then update on its minibatches."""
    return launch_train_step(run, step)()


def launch_train_step(run: Run, step: int) -> PendingMetrics:
    """Launch a training step without waiting for the GPU. Call the returned function to get its metrics."""
    began, engine, objective = time.perf_counter(), run.engine, run.objective
    rows = run.batch.prompts // engine.rows.world
    ctx, means, launched = run.context(step, rows), AverageMeter(), list[PendingUpdate]()
    with engine.computing():
        batch = run.data.batch(step, run.batch.prompts, engine.rows.rank, engine.rows.world)
        experience = objective.collect(ctx, batch)
        means.add(objective.watch(experience), len(experience))
    run.whole = False
    own = run.context(step, len(experience)).rng  # of what was gathered, which may be several rows of each prompt
    with fork_rng(engine.device, hash((run.seed, step, engine.rows.rank))):
        for epoch in range(run.batch.epochs):
            for i, chosen in enumerate(split_minibatches(len(experience), run.batch.updates, ctx.rng, epoch)):
                draw, both = epoch * run.batch.updates + i, (experience, own)
                seen, rng = both if run.batch.updates == 1 else select_rows(both, chosen)
                launched.append(update(run, replace(ctx, epoch=epoch), seen, rng, draw, means))
                if run.ema:
                    count = step * run.batch.epochs * run.batch.updates + draw
                    run.policy.weights.blend("ema", ema_decay_warmup(run.ema, count))
    objective.after_update(ctx)
    run.whole = True
    found, samples = means.fetched(engine.comm), run.batch.prompts * objective.group

    def telling() -> StepCompleted:
        update = [told() for told in launched][-1]
        metrics = {**found(), "grad_norm": update.grad_norm, "lr": update.lr}
        return StepCompleted(step + 1, metrics, time.perf_counter() - began, samples)

    return telling


@contextmanager
def fork_rng(device: torch.device, seed: int) -> Iterator[None]:
    """Seed the global RNG within the block, so that layers that draw from it (dropout) are reproducible."""
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        yield


def update(
    run: Run, ctx: Context[Any], experience: Any, rng: Randomness, draw: int, means: AverageMeter
) -> PendingUpdate:
    """Accumulate gradients over all parts of all micro-batches, then take one optimizer step on all ranks."""
    engine, objective = run.engine, run.objective
    total = len(experience) * engine.rows.world
    chunks = torch.split(torch.arange(len(experience)), run.batch.microbatch or len(experience))
    for chunk in chunks:
        mini = experience if len(chunks) == 1 else select_rows(experience, chunk)
        parts = objective.parts(mini)
        if not parts:
            raise TrainingError(
                "the experience has no parts to learn from: the sampler decided nothing; give it chance"
            )
        for i, part in enumerate(parts):
            last = chunk is chunks[-1] and i == len(parts) - 1
            own = rng if len(chunks) == 1 else select_rows(rng, chunk)
            with run.policy.weights.dropping(own, draw * len(parts) + i):
                with engine.computing(), engine.keeping():
                    loss = objective.loss(ctx, mini, part)
                engine.backward(loss.rows.sum() / total, last=last)
            means.note(loss, len(parts))
    return engine.launch(ctx.rng.step)


def split_minibatches(rows: int, updates: int, rng: Randomness, epoch: int) -> Sequence[Tensor]:
    """Shuffle sample indices for this epoch and split them into minibatches."""
    if updates == 1:
        return (torch.arange(rows),)
    first = Randomness(rng.seed, rng.step, rng.rows[:1].cpu())
    order = first.uniform("order", rows, draw=epoch).flatten().argsort()
    return order.tensor_split(updates)


@torch.no_grad()
def generate_samples(run: Run, step: int) -> SamplesGenerated:
    """Generate and score samples from fixed prompts and fixed noise, with live or EMA weights (`sample.use`)."""
    chosen = run.asked(run.sample.count)
    prompts = run.sample.prompts or chosen.prompts
    facts = () if run.sample.prompts else chosen.facts
    pixels = sample_pixels(run, prompts, facts)
    if run.sample.prompts and run.objective.consumes is ImageBatch:
        return SamplesGenerated(
            step, tuple(prompts), pixels.float().clamp(0, 1).cpu(), {}
        )  # there are no pictures of these
    with run.engine.computing():
        scores = run.rubric.score(pixels, prompts, facts)
    means = {name: part.mean().item() for name, part in scores.parts.items()}
    return SamplesGenerated(step, tuple(prompts), pixels.float().clamp(0, 1).cpu(), means)


class AverageMeter:
    """Running means of metrics over samples, parts and micro-batches, reduced over ranks at the end."""

    def __init__(self) -> None:
        self.sums: dict[str, Tensor] = {}
        self.counts: dict[str, float] = {}

    def add(self, metrics: Mapping[str, Tensor], rows: int) -> None:
        means = [value.detach().float().mean() for value in metrics.values()]
        # All at once, as below: each would be a kernel of its own, and a small network has few more.
        for name, value in zip(metrics, torch._foreach_mul(means, rows) if means else (), strict=True):
            self.sums[name] = self.sums[name] + value if name in self.sums else value
            self.counts[name] = self.counts.get(name, 0.0) + rows

    def note(self, loss: Loss, parts: int) -> None:
        rows = len(loss.rows)
        self.add(loss.metrics, rows)
        self.add({"loss": loss.rows * parts}, rows)  # parts add up, so their mean is their sum over their number

    def over(self, comm: Comm) -> dict[str, float]:
        return self.fetched(comm)()

    def fetched(self, comm: Comm) -> Callable[[], dict[str, float]]:
        """Start the reduction over ranks without waiting. Call the returned function to get the means."""
        names = list(self.sums)
        values = torch.stack(torch._foreach_div([self.sums[name] for name in names], list(self.counts.values())))
        numbers = copy_to_host_async(comm.mean(values))
        return lambda: dict(zip(names, numbers(), strict=True))


@contextmanager
def stop_on_signal() -> Iterator[threading.Event]:
    """Yield an event that SIGTERM or the first Ctrl-C sets; the second Ctrl-C interrupts at once."""
    asked = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield asked
        return

    def ask(number: int, frame: object) -> None:
        if asked.is_set() and number == signal.SIGINT:
            raise KeyboardInterrupt
        asked.set()

    before = {number: signal.signal(number, ask) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
