"""The loop. What changes a run is written here, in order; what only watches one consumes its events."""

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

from ..objective import Comm, Context
from ..randomness import Randomness
from ..types import Loss, Pictures, index
from ..weights import warm
from .engine import TrainingError, Update
from .events import Event, Finished, Guarded, Sampled, Saved, Started, Updated
from .guard import judge
from .looking import paint
from .rescue import rescued
from .run import Run
from .telling import Lead, Telling, due, fetched

Launched = Callable[[], Update]


def train(run: Run) -> Iterator[Event]:
    """Learn until the last step, telling of each; a signal to stop saves first and ends early."""
    return rescued(run, learning(run))


def learning(run: Run) -> Iterator[Event]:
    """The same, without saving what a failure would lose."""
    yield Started(run.start, run.steps, run.directory, sum(p.numel() for p in run.policy.weights.trainable().values()))
    if run.sample.every and run.start == 0:
        yield look(run, 0)
    if guarded(run) and not run.history.looks:
        yield judge(run, run.start)
    lead = Lead(run.engine.leads)
    with asked_to_stop() as asked:
        for step in range(run.start, run.steps):
            done, reason = step + 1, ""
            every = (run.sample.every, run.guard.every if guarded(run) else 0, run.checkpoint.every)
            looked, judged, saved = (due(done, often, run.steps) for often in every)
            yield from lead.told(partial(begin, run, step), now=looked or judged or saved)
            if run.engine.comm.any(asked.is_set()):
                reason = f"asked to stop after step {done}; the same command goes on from there"
                yield from lead.rest()
            if looked:
                yield look(run, done)
            if judged:
                found = judge(run, done)
                yield found
                reason = halt(run, found) or reason
            if saved or reason or run.history.best == done:
                yield Saved(done, run.save(done))
            if reason and done < run.steps:
                yield Finished(done, reason)
                return
    yield Finished(run.steps, f"all {run.steps} steps done")


def guarded(run: Run) -> bool:
    """Whether there is a guard; without any reward it would have nothing to compare."""
    return bool(run.guard.every and run.rubric.rewards)


def halt(run: Run, found: Guarded) -> str:
    """Why the guard ends the run, if it does."""
    if not run.guard.stop or not found.warning:
        return ""
    best = f", and checkpoints/best is step {run.history.best}" if run.history.best else ""
    return f"stopped by the guard after step {found.step}: {found.warning}{best}"


def learn(run: Run, step: int) -> Updated:
    """One step: gather experience, then learn from it in updates of minibatches, each in parts."""
    return begin(run, step)()


def begin(run: Run, step: int) -> Telling:
    """The same; a device may go on with it when this comes back, and what came of it is told when asked for."""
    began, engine, objective = time.perf_counter(), run.engine, run.objective
    rows = run.batch.prompts // engine.rows.world
    ctx, means, launched = run.context(step, rows), Means(), list[Launched]()
    with engine.computing():
        batch = run.data.batch(step, run.batch.prompts, engine.rows.rank, engine.rows.world)
        experience = objective.collect(ctx, batch)
        means.add(objective.watch(experience), len(experience))
    run.whole = False
    own = run.context(step, len(experience)).rng  # of what was gathered, which may be several rows of each prompt
    with seeded(engine.device, hash((run.seed, step, engine.rows.rank))):
        for epoch in range(run.batch.epochs):
            for i, chosen in enumerate(minibatches(len(experience), run.batch.updates, ctx.rng, epoch)):
                draw, both = epoch * run.batch.updates + i, (experience, own)
                seen, rng = both if run.batch.updates == 1 else index(both, chosen)
                launched.append(improve(run, replace(ctx, epoch=epoch), seen, rng, draw, means))
                if run.ema:
                    count = step * run.batch.epochs * run.batch.updates + draw
                    run.policy.weights.blend("ema", warm(run.ema, count))
    objective.after_update(ctx)
    run.whole = True
    found, samples = means.fetched(engine.comm), run.batch.prompts * objective.group

    def telling() -> Updated:
        update = [told() for told in launched][-1]
        metrics = {**found(), "grad_norm": update.grad_norm, "lr": update.lr}
        return Updated(step + 1, metrics, time.perf_counter() - began, samples)

    return telling


@contextmanager
def seeded(device: torch.device, seed: int) -> Iterator[None]:
    """Within the block, what networks leave to chance by themselves, such as dropout, is always the same."""
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        yield


def improve(run: Run, ctx: Context[Any], experience: Any, rng: Randomness, draw: int, means: Means) -> Launched:
    """One optimizer update: every part of every microbatch adds to the gradient, then all ranks step."""
    engine, objective = run.engine, run.objective
    total = len(experience) * engine.rows.world
    chunks = torch.split(torch.arange(len(experience)), run.batch.microbatch or len(experience))
    for chunk in chunks:
        mini = experience if len(chunks) == 1 else index(experience, chunk)
        parts = objective.parts(mini)
        if not parts:
            raise TrainingError(
                "the experience has no parts to learn from: the sampler decided nothing; give it chance"
            )
        for i, part in enumerate(parts):
            last = chunk is chunks[-1] and i == len(parts) - 1
            own = rng if len(chunks) == 1 else index(rng, chunk)
            with run.policy.weights.dropping(own, draw * len(parts) + i):
                with engine.computing(), engine.keeping():
                    loss = objective.loss(ctx, mini, part)
                engine.backward(loss.rows.sum() / total, last=last)
            means.note(loss, len(parts))
    return engine.launch(ctx.rng.step)


def minibatches(rows: int, updates: int, rng: Randomness, epoch: int) -> Sequence[Tensor]:
    """Rows in a new order each pass, cut into as many pieces as there are updates."""
    if updates == 1:
        return (torch.arange(rows),)
    first = Randomness(rng.seed, rng.step, rng.rows[:1].cpu())
    order = first.uniform("order", rows, draw=epoch).flatten().argsort()
    return order.tensor_split(updates)


@torch.no_grad()
def look(run: Run, step: int) -> Sampled:
    """The same prompts from the same noise, on the weights that will be used."""
    chosen = run.asked(run.sample.count)
    prompts = run.sample.prompts or chosen.prompts
    facts = () if run.sample.prompts else chosen.facts
    pixels = paint(run, prompts, facts)
    if run.sample.prompts and run.objective.consumes is Pictures:
        return Sampled(step, tuple(prompts), pixels.float().clamp(0, 1).cpu(), {})  # there are no pictures of these
    with run.engine.computing():
        scores = run.rubric.score(pixels, prompts, facts)
    means = {name: part.mean().item() for name, part in scores.parts.items()}
    return Sampled(step, tuple(prompts), pixels.float().clamp(0, 1).cpu(), means)


class Means:
    """Running means over rows, parts, microbatches and, at last, ranks."""

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
        """The same, when asked for."""
        names = list(self.sums)
        values = torch.stack(torch._foreach_div([self.sums[name] for name in names], list(self.counts.values())))
        numbers = fetched(comm.mean(values))
        return lambda: dict(zip(names, numbers(), strict=True))


@contextmanager
def asked_to_stop() -> Iterator[threading.Event]:
    """Set by SIGTERM (a scheduler's preemption) and by the first Ctrl-C; the second interrupts at once."""
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
