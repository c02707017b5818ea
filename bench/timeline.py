"""Where the time of a training step goes, by what the device is busy with."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from device import CUDA, settle  # beside this file, in no package
from sections import say
from torch import Tensor

from tastemaker.config.schema import BatchConfig
from tastemaker.training.loop import train_step
from tastemaker.training.run import Run


class Timeline:
    """What the device is busy with: each mark begins another thing."""

    def __init__(self) -> None:
        self.marks: list[tuple[str, Any]] = []
        self.scored = False  # the graph ends in a reward, so its gradient comes first

    def mark(self, label: str) -> None:
        if CUDA:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
        self.marks.append((label, event if CUDA else time.perf_counter()))

    def seconds(self) -> dict[str, float]:
        self.mark("end")
        settle()
        found: dict[str, float] = defaultdict(float)
        for (label, begun), (_, ended) in zip(self.marks, self.marks[1:], strict=False):
            found[label] += begun.elapsed_time(ended) / 1000 if CUDA else ended - begun
        self.marks = []
        return dict(found)


def watched(run: Run) -> Timeline:
    """Let the parts of a run say when they begin and end."""
    line, model, engine, rubric = Timeline(), run.policy.model, run.engine, run.rubric
    owner: Any = getattr(model, "model", model)  # within guidance
    decode, backward, launch, score = owner.decode, engine.backward, engine.launch, rubric.score_each

    def decoded(x: Tensor, frames: Any = None) -> Tensor:
        line.mark("vae")
        shown: Tensor = decode(x, frames)
        line.mark("other")
        if shown.requires_grad:
            line.scored = True
            x.register_hook(lambda _: line.mark("network with gradient"))
            shown.register_hook(lambda _: line.mark("vae"))
        return shown

    def scored(*given: Any, **named: Any) -> Any:
        line.mark("reward")
        found = score(*given, **named)
        line.mark("other")
        return found

    def backed(value: Tensor, *, last: bool) -> None:
        line.mark("reward" if line.scored else "network with gradient")
        backward(value, last=last)
        line.mark("other")
        line.scored = False

    def launched(number: int) -> Any:
        line.mark("optimizer")
        update = launch(number)
        line.mark("other")
        return update

    net = run.policy.weights.net
    net.register_forward_pre_hook(
        lambda *_: line.mark("network with gradient" if torch.is_grad_enabled() else "rollout")
    )
    net.register_forward_hook(lambda *_: line.mark("other"))
    owner.decode, engine.backward, engine.launch = decoded, backed, launched  # type: ignore[method-assign]
    rubric.score_each = scored  # type: ignore[method-assign]
    return line


def gib(*, peak: bool = False) -> float:
    if not CUDA:
        return 0.0
    return (torch.cuda.max_memory_allocated() if peak else torch.cuda.memory_allocated()) / 2**30


def graphs() -> int:
    from torch._dynamo.utils import counters

    return int(counters["stats"]["unique_graphs"])


def warm(run: Run) -> None:
    """Everything once, with few steps a sample: compiles, allocates and begins."""
    policy = run.policy
    run.policy = replace(policy, process=replace(policy.process, steps=4 if policy.process.chance else 2))
    train_step(run, 0)
    run.policy = policy
    settle()


def timed(
    run: Run, line: Timeline, section: str, batch: BatchConfig, deadline: float, times: int = 2
) -> dict[str, Any]:
    """Seconds a prompt and where they went, after a step to warm up."""
    run.batch = batch
    if CUDA:
        torch.cuda.reset_peak_memory_stats()
    began = time.perf_counter()
    warm(run)
    say(section, f"{describe(batch)}: warm after {time.perf_counter() - began:.0f} s, {graphs()} graphs")
    before, spent = graphs(), []
    line.seconds()
    for step in range(1, times + 1):
        if spent and time.monotonic() + 1.3 * spent[0] > deadline:
            break
        settle()
        began = time.perf_counter()
        update = train_step(run, step)
        settle()
        spent.append(time.perf_counter() - began)
        told = " ".join(f"{name} {value:.4g}" for name, value in update.metrics.items())
        say(section, f"{describe(batch)}: step of {spent[-1]:.2f} s; {told}")
    where = line.seconds()
    samples = batch.prompts * run.objective.group
    total = sum(where.values())
    result = {
        "section": section,
        "batch": describe(batch),
        "seconds a prompt": min(spent) / batch.prompts,
        "seconds a sample": min(spent) / samples,
        "peak GiB": gib(peak=True),
        "shares": {name: value / total for name, value in sorted(where.items()) if name != "end"},
        "graphs": before,
        "recompiled": graphs() - before,
    }
    shares = ", ".join(f"{name} {share:.1%}" for name, share in result["shares"].items())
    say(
        section,
        f"{describe(batch)}: {result['seconds a prompt']:.3f} s a prompt, {result['peak GiB']:.1f} GiB; {shares}",
    )
    return result


def describe(batch: BatchConfig) -> str:
    return f"{batch.prompts} prompts, {batch.rollout} sampled and {batch.microbatch} trained at once"


def once(work: Callable[[], Any], repeats: int = 5) -> float:
    """Milliseconds a call: the median, after two to warm up."""
    for _ in range(2):
        work()
    found = []
    for _ in range(repeats):
        settle()
        began = time.perf_counter()
        work()
        settle()
        found.append(time.perf_counter() - began)
    return 1000 * sorted(found)[len(found) // 2]
