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
    "rollout": "activations while sampling",
    "training": "activations while training",
}


def plan(config: RunConfig, world: int, room: float, rate: float, console: Console) -> bool:
    """Print the plan; says whether it fits into `room` GiB."""
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
    seconds = found.work / (rate * 1e12)
    console.print(
        f"A step is {found.work / 1e15:.1f} PFLOP of the network: {seconds:.0f} s at {rate:.0f} TFLOP/s, "
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
        found = replace(found, training=training / micro, rollout=min(found.rollout, training / micro))
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
