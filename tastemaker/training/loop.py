"""The training loop: everything that changes a run, in order. Loggers only consume its events."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from ..core.checkpoint_files import checkpoint_step
from ..core.interruption import Interrupted, StopRequest, handle_signals
from ..core.objective import Context, NoState
from ..core.randomness import Purpose, Randomness
from ..core.registry import ConfigError
from ..core.types import select_rows
from ..core.weights import ema_decay_warmup
from .engine import Engine, LaunchedUpdate, TrainingError
from .events import CheckpointSaved, Event, GuardChecked, TrainingFinished, TrainingStarted
from .guard import run_guard
from .metrics import AsyncMetrics, AverageMeter, StepMetrics, StepTimer, scoring_metrics
from .run import Run
from .samples import generate_samples

REWARD_FILES = "rewards"  # folder of a run in which rewards keep what must survive a restart


def train(run: Run) -> Iterator[Event]:
    """Train until the last step and yield an event for everything that happens.

    SIGTERM, Ctrl-C, SIGHUP and SIGQUIT save a checkpoint and stop early: after the current step, or after the one
    before if a reward of the current one hangs. If an exception is raised between two steps, for example because a
    reward server does not answer, the last completed step is saved before the exception is raised again.
    """
    run.rubric.persist_in(run.directory / REWARD_FILES)
    metrics = AsyncMetrics(run.engine.asynchronous)
    done = saved = run.start_step
    parameters = sum(p.numel() for p in run.policy.weights.trainable().values())
    yield TrainingStarted(run.start_step, run.steps, run.directory, parameters, guard_notes(run))
    try:
        if run.sample.every and run.start_step == 0:
            yield generate_samples(run, 0)
        if guard_enabled(run) and not run.guard_history.measurements:
            yield run_guard(run, run.start_step)
        with stop_on_signal() as stop_requested:
            allow_abandoning(run, stop_requested)
            for step in range(run.start_step, run.steps):
                launched = train_step(run, step)
                done, stop_reason = step + 1, ""
                sample_due = is_due(done, run.sample.every, run.steps)
                guard_due = guard_enabled(run) and is_due(done, run.guard.interval(run.steps), run.steps)
                checkpoint_due = is_due(done, run.checkpoint.every, run.steps)
                last = done == run.steps
                yield from metrics.push(launched, wait=sample_due or guard_due or checkpoint_due or last)
                yield from report_saved(run.checkpoint_writer.poll())
                if run.engine.comm.any(stop_requested.is_set()):
                    stop_reason = interruption_reason(done)
                    yield from metrics.flush()
                if sample_due:
                    yield generate_samples(run, done)
                if guard_due:
                    check = run_guard(run, done)
                    yield check
                    stop_reason = guard_stop_reason(run, check) or stop_reason
                if checkpoint_due or stop_reason or run.guard_history.best_step == done:
                    yield from save_checkpoint(run, done, wait=last or bool(stop_reason))
                    saved = done
                if stop_reason and not last:
                    yield TrainingFinished(done, stop_reason)
                    return
    except Interrupted as error:
        yield from metrics.flush()
        yield from report_saved(run.finish_saving())
        yield from save_after_interruption(run, error, done, saved)
        return
    except Exception as error:
        yield from metrics.flush()  # raises if the step before failed, which is then the cause
        yield from report_saved(run.finish_saving())
        yield from save_after_failure(run, error, done, saved)
        raise
    yield TrainingFinished(run.steps, f"all {run.steps} steps done")


def train_step(run: Run, step: int) -> StepMetrics:
    """Collect experience and update on its minibatches, `batch.epochs` times. Does not wait for the GPU."""
    started, engine, objective = time.perf_counter(), run.engine, run.objective
    means, timer, ranks = AverageMeter(), StepTimer(engine.device), engine.data_parallel
    ctx = replace(run.context(step, run.batch.prompts // ranks.world_size), measure_time=timer.measure)
    with timer.measure("collect"), engine.autocast():
        batch = run.data.batch(step, run.batch.prompts, ranks.rank, ranks.world_size)
        experience = objective.collect(ctx, batch)
        means.add(objective.metrics(experience), len(experience))
        means.add(scoring_metrics(ctx.rubric, engine.device), len(experience))
    # A state, such as that of a tracker, may already contain this batch; weights change in `update`.
    run.step_complete = isinstance(ctx.state, NoState)
    updates: list[LaunchedUpdate] = []
    rng = run.context(step, len(experience)).rng  # a stream for each sample, of which a prompt may have several
    with timer.measure("update"), fork_rng(engine.device, hash((run.seed, step, ranks.rank))):
        for epoch in range(run.batch.epochs):
            for i, indices in enumerate(split_minibatches(len(experience), run.batch.minibatches, ctx.rng, epoch)):
                draw = epoch * run.batch.minibatches + i
                minibatch = experience, rng
                if run.batch.minibatches > 1:
                    minibatch = select_rows(minibatch, indices)
                updates.append(update(run, replace(ctx, epoch=epoch), *minibatch, draw, means))
                if run.ema_decay:
                    count = step * run.batch.epochs * run.batch.minibatches + draw
                    run.policy.weights.update_snapshot("ema", ema_decay_warmup(run.ema_decay, count))
    objective.after_update(ctx)
    run.step_complete = True
    return StepMetrics(
        step=step + 1,
        samples=run.batch.prompts * (objective.samples_per_prompt() or objective.group_size),
        means=means.mean(engine.comm),
        updates=[("grad_norm", launched) for launched in updates],
        lr=updates[-1].lr,
        started=started,
        timings=lambda: phase_timings(timer.seconds(), samples=objective.samples_per_prompt() > 0),
    )


def update(
    run: Run, ctx: Context[Any], experience: Any, rng: Randomness, draw: int, means: AverageMeter
) -> LaunchedUpdate:
    """Accumulate gradients over all parts of all micro-batches, then take one optimizer step on all ranks."""
    engine, objective = run.engine, run.objective
    total = len(experience) * engine.data_parallel.world_size
    chunks = torch.split(torch.arange(len(experience)), run.batch.micro_batch_size or len(experience))
    for chunk in chunks:
        micro_batch, micro_rng = (experience, rng) if len(chunks) == 1 else select_rows((experience, rng), chunk)
        parts = objective.parts(micro_batch)
        if not parts:
            raise TrainingError(
                "process.dynamics: the samples have no stochastic steps to train on; make the sampler "
                "stochastic, for example process.dynamics.type=flow_sde [TM278]"
            )
        for i, part in enumerate(parts):
            last = chunk is chunks[-1] and i == len(parts) - 1
            with run.policy.weights.dropout_masks(micro_rng, draw * len(parts) + i):
                with engine.autocast(), engine.offload_activations():
                    loss = objective.loss(ctx, micro_batch, part)
                engine.backward(loss.rows.sum() / total, last=last)
            means.add_loss(loss, len(parts))
    run.step_complete = False
    return engine.launch_step(ctx.rng.step)


def phase_timings(seconds: Mapping[str, float], *, samples: bool) -> dict[str, float]:
    """Return time/rollout, time/reward and time/update; time/data if the objective generates no samples.

    time/reward is what scoring adds to the step. time/reward_wait is its part that waits for rewards in threads.
    """
    timings = {"time/rollout" if samples else "time/data": seconds["collect"] - seconds.get("reward", 0.0)}
    timings |= {f"time/{name}": seconds[name] for name in ("reward", "reward_wait") if name in seconds}
    return {**timings, "time/update": seconds["update"]}


def save_checkpoint(run: Run, step: int, *, wait: bool) -> Iterator[Event]:
    """Save a checkpoint; with `checkpoint.asynchronous` only start to, unless it has to be complete at once."""
    yield from report_saved(run.finish_saving())
    if run.checkpoint.asynchronous and not wait:
        run.start_saving(step)
    else:
        yield CheckpointSaved(step, run.save(step))


def report_saved(path: Path | None) -> Iterator[Event]:
    """Yield the event of a checkpoint that a thread has completed."""
    if path is not None:
        yield CheckpointSaved(checkpoint_step(path) or 0, path)


class SavableRun(Protocol):
    """A run that can be saved between two steps."""

    engine: Engine
    step_complete: bool  # False while a step updates the weights

    def save(self, step: int) -> Path: ...


def save_after_failure(run: SavableRun, error: Exception, done: int, saved: int) -> Iterator[Event]:
    """Save a checkpoint after a failure between two steps; a ConfigError is raised again with a note about it.

    Nothing is saved if the update failed (TrainingError), in the middle of an update, or if no step was completed
    since the last checkpoint; nor on several ranks, because the others do not know of the failure.
    """
    if isinstance(error, TrainingError):
        return
    if done == saved or not run.step_complete or run.engine.comm.world_size > 1:
        return
    yield CheckpointSaved(done, run.save(done))
    if isinstance(error, ConfigError):
        hint = f"step {done} is saved, so fix this and run the same command to resume"
        raise ConfigError(f"{error}; {hint} [TM279]") from error


def allow_abandoning(run: Run, stop: StopRequest) -> None:
    """Let calls that hang be given up after a stop request; on several ranks only where all of them do so together."""
    world_size = run.engine.comm.world_size
    stop.may_abandon = world_size == 1
    stop.ranks_can_agree = world_size > 1 and run.engine.data_parallel.world_size == world_size


def save_after_interruption(run: SavableRun, error: Interrupted, done: int, saved: int) -> Iterator[Event]:
    """Save the last completed step after a call was abandoned because the run was asked to stop.

    Raises the interruption again if there is nothing that can be saved: in the middle of an update, or on several
    ranks of which the others were not interrupted at the same place.
    """
    if not run.step_complete or (run.engine.comm.world_size > 1 and not error.on_all_ranks):
        raise error
    if done > saved:
        yield CheckpointSaved(done, run.save(done))
    yield TrainingFinished(done, interruption_reason(done))


def interruption_reason(done: int) -> str:
    """Return the reason of `TrainingFinished` after a signal."""
    return f"asked to stop after step {done}; run the same command to resume"


def is_due(done: int, every: int, steps: int) -> bool:
    """Return whether a periodic action is due: every `every` steps and after the last step."""
    return bool(every) and (done % every == 0 or done == steps)


def guard_enabled(run: Run) -> bool:
    """Return whether the guard runs; it needs rewards to compare."""
    return bool(run.guard.interval(run.steps) and run.rubric.rewards)


def guard_notes(run: Run) -> tuple[str, ...]:
    """Return what the guard will not see: everything if it is off, and quality if no reward is held out."""
    if not run.rubric.rewards:
        return ()
    advice = "add a reward with weight 0, such as 'rewards.aesthetic={type: aesthetic, weight: 0}'"
    if run.guard.every == 0:
        return ("the guard is off, so reward hacking is not detected; remove guard.every=0",)
    if not run.guard_history.held_out:
        return (f"no reward is held out, so the guard can only detect a loss of diversity; {advice}",)
    return ()


def guard_stop_reason(run: Run, check: GuardChecked) -> str:
    """Return why the guard stops the run, or an empty string if it does not."""
    if not run.guard.stop_on_warning or not check.warning:
        return ""
    best = f", and checkpoints/best is step {run.guard_history.best_step}" if run.guard_history.best_step else ""
    return f"stopped by the guard after step {check.step}: {check.warning}{best}"


@contextmanager
def fork_rng(device: torch.device, seed: int) -> Iterator[None]:
    """Seed the global RNG within the block, so that layers that draw from it (dropout) are reproducible."""
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        yield


def split_minibatches(samples: int, minibatches: int, rng: Randomness, epoch: int) -> Sequence[Tensor]:
    """Shuffle sample indices for this epoch and split them into minibatches."""
    if minibatches == 1:
        return (torch.arange(samples),)
    first = Randomness(rng.seed, rng.step, rng.rows[:1].cpu())
    order = first.uniform(Purpose.MINIBATCH_ORDER, samples, draw=epoch).flatten().argsort()
    return order.tensor_split(minibatches)


def stop_on_signal() -> AbstractContextManager[StopRequest]:
    """Return a block in which SIGTERM, SIGHUP, SIGQUIT and Ctrl-C set a request; the second Ctrl-C ends the process."""
    return handle_signals(raising=False)
