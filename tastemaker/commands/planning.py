"""`tastemaker plan`: whether a run fits a GPU and how long its steps take, and what to change if it does not fit."""

from __future__ import annotations

from dataclasses import replace

from rich.console import Console
from rich.table import Table

from ..config.arithmetic import arithmetic
from ..config.run import RunConfig
from ..objectives.srpo import SRPO
from ..planning.memory import MOMENTS, Peak, peak, rows

GIB = 2**30
NAMES = {
    "weights": "weights of the network",
    "gradients": "gradients",
    "moments": "what AdamW remembers",
    "snapshots": "snapshots",
    "frozen": "autoencoder and rewards",
    "cache": "cache of keys and values, copied weights",
    "rollout": "activations while sampling",
    "training": "activations while training",
}


def plan(config: RunConfig, world: int, room: float, rate: float, bandwidth: float, console: Console) -> bool:
    """Print the plan, at so many TFLOP and TB a second; says whether it fits into `room` GiB."""
    found, at_once = peak(config, world), rows(config, world)
    table = Table("on one GPU", "GiB", title=f"{config.name or type(config.model).__name__} on {world} rank(s)")
    for name, told in NAMES.items():
        table.add_row(told, f"{getattr(found, name) / GIB:.1f}")
    table.add_row("at the worst moment", f"{found.total / GIB:.1f}", style="bold")
    console.print(table)
    steps = arithmetic(config, world)
    console.print(
        f"The network sees {at_once.rollout} rows at once while sampling and {at_once.training} while training; "
        f"{steps['samples a step']} samples a step, {steps['updates a step']} update(s)."
    )
    seconds = found.seconds(rate * 1e12, bandwidth * 1e12)
    moved = f" and {found.moved / 1e12:.2g} TB read token by token" if found.moved else ""
    speed = f"{rate:.0f} TFLOP/s" + (f" and {bandwidth:.1f} TB/s" if found.moved else "")
    console.print(
        f"A step is {found.work / 1e15:.3g} PFLOP of the network{moved}: {seconds:.2g} s at {speed}, "
        f"{config.steps} steps {config.steps * seconds / 3600:.1f} h."
    )
    fits = found.total <= room * GIB
    console.print(f"It {'fits' if fits else 'does not fit'} into {room:.0f} GiB.")
    for change, total in [] if fits else changes(config, found, world):
        console.print(f"  {change}: {total / GIB:.1f} GiB", highlight=False)
        if total <= room * GIB:
            break
    return fits


def changes(config: RunConfig, found: Peak, world: int) -> list[tuple[str, float]]:
    """Settings that take less, gentle ones first, and what each takes together with those before it."""
    told: list[tuple[str, float]] = []
    engine, optim, training = config.engine, config.optim, found.training
    if engine.memory == "keep":
        less = peak(replace(config, engine=replace(engine, memory="recompute")), world)
        found, training = less, less.training
        told.append(("engine.memory=recompute", less.total))
    if engine.trainable == "fp32" and engine.precision == "bf16" and not config.tuning.adapts:
        found = replace(found, weights=found.weights / 2, gradients=found.gradients / 2)
        told.append(("engine.trainable=bf16", found.total))
    if optim.moments != "int8":
        found = replace(found, moments=found.moments * MOMENTS["int8"] / MOMENTS[optim.moments])
        told.append(("optim.moments=int8", found.total))
    micro = config.batch.microbatch or config.batch.prompts
    if micro > 1:
        fewer = max(1, rows(config, world).rollout // 2)
        cache, least = found.cache / fewer, min(found.rollout, training / micro)
        found = replace(found, training=training / micro, rollout=least, cache=cache)
        told.append(("batch.microbatch=1 batch.rollout=1", found.total))
    if isinstance(config.objective, SRPO) and config.objective.merged and len(config.objective.branches) > 1:
        found = replace(found, training=found.training / 2)
        told.append(("objective.merged=false", found.total))
    if not config.tuning.adapts:
        found = replace(found, gradients=0.02 * found.gradients, moments=0.02 * found.moments, snapshots=0.0)
        told.append(("'tuning={type: lora}', nearly", found.total))
    if world == 1:
        told.append(("engine.strategy=fsdp on two GPUs, nearly", found.total - (found.total - found.training) / 2))
    return told
