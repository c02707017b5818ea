"""`tastemaker plan`: whether a run fits a GPU and how long its steps take, and what to change if it does not fit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from rich.console import Console
from rich.table import Table

from ..config.schema import AnyConfig, AutoencoderRunConfig, JudgeRunConfig, RunConfig
from ..config.step_counts import compute_step_counts
from ..core.registry import ConfigError
from ..objectives.srpo import SRPO
from ..training.device_precision import resolve_for_planning
from .autoencoder_plan import estimate_autoencoder_resources as copying
from .autoencoder_plan import micro_batch_per_rank
from .resource_plan import OPTIMIZER_STATE_BYTES, ResourceEstimate, estimate_resources, network_batch_sizes

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
AUTOENCODER_NAMES = {
    "weights": "weights of the autoencoder, and of its critic",
    "gradients": "gradients",
    "moments": "what AdamW remembers",
    "snapshots": "snapshots",
    "frozen": "LPIPS",
    "rollout": "activations while the critic learns",
    "training": "activations while the autoencoder learns",
}


@dataclass(frozen=True)
class GpuSpec:
    """What there is on one, and what it reaches."""

    room: float = 80.0  # GiB
    rate: float = 540.0  # TFLOP a second
    bandwidth: float = 4.3  # TB a second


def print_plan(config: AnyConfig, world: int, gpu: GpuSpec, console: Console) -> bool:
    """Print the plan; says whether it fits."""
    if isinstance(config, JudgeRunConfig):
        raise ConfigError("plan: the recipe trains a judge, whose sizes are not known here; try it, with `train`")
    engine, choice = resolve_for_planning(config.engine)
    config = replace(config, engine=engine)
    if isinstance(config, AutoencoderRunConfig):
        found, names, less = copying(config, world), AUTOENCODER_NAMES, autoencoder_savings(config, world)
    else:
        found = estimate_resources(config, world)
        names, less = NAMES, iter(memory_savings(config, found, world)) if found.total > gpu.room * GIB else iter(())
    table = Table("on one GPU", "GiB", title=f"{config.name} on {world} rank(s)")
    for name, told in names.items():
        table.add_row(told, f"{getattr(found, name) / GIB:.1f}")
    table.add_row("at the worst moment", f"{found.total / GIB:.1f}", style="bold")
    console.print(table)
    console.print(f"precision: {choice}", highlight=False, markup=False, soft_wrap=True)
    console.print(describe_batch(config, world))
    console.print(describe_step_time(config, found, gpu))
    fits = found.total <= gpu.room * GIB
    console.print(f"It {'fits' if fits else 'does not fit'} into {gpu.room:.0f} GiB.")
    for change, total in () if fits else less:
        console.print(f"  {change}: {total / GIB:.1f} GiB", highlight=False)
        if total <= gpu.room * GIB:
            break
    return fits


def describe_batch(config: RunConfig | AutoencoderRunConfig, world: int) -> str:
    """How many rows there are at once, in words."""
    steps = compute_step_counts(config, world)
    if isinstance(config, AutoencoderRunConfig):
        network_batch = micro_batch_per_rank(config, world)
        return f"The network sees {network_batch} pictures at once; {config.rows} a step, over all ranks."
    at_once = network_batch_sizes(config, world)
    return (
        f"The network sees {at_once.rollout} rows at once while sampling and {at_once.training} while training; "
        f"{steps['samples a step']} samples a step, {steps['updates a step']} update(s)."
    )


def describe_step_time(config: RunConfig | AutoencoderRunConfig, found: ResourceEstimate, gpu: GpuSpec) -> str:
    """How long it takes, in words."""
    seconds = found.seconds(gpu.rate * 1e12, gpu.bandwidth * 1e12)
    moved = f" and {found.moved / 1e12:.2g} TB read token by token" if found.moved else ""
    speed = f"{gpu.rate:.0f} TFLOP/s" + (f" and {gpu.bandwidth:.1f} TB/s" if found.moved else "")
    whole = config.steps * seconds
    time = f"{whole / 3600:.1f} h" if whole >= 360 else f"{whole / 60:.1f} min"
    work = f"A step is {found.work / 1e15:.3g} PFLOP of the network{moved}"
    return f"{work}: {seconds:.2g} s at {speed}, {config.steps} steps {time}."


def autoencoder_savings(config: AutoencoderRunConfig, world: int) -> Iterator[tuple[str, float]]:
    """Settings of an autoencoder's run that take less, and what each takes together with those before it."""
    if config.engine.precision == "fp32":
        config = replace(config, engine=replace(config.engine, precision="bf16"))
        yield "engine.precision=bf16", copying(config, world).total
    if config.engine.memory == "keep":
        config = replace(config, engine=replace(config.engine, memory="recompute"))
        yield "engine.memory=recompute", copying(config, world).total
    at_once = micro_batch_per_rank(config, world)
    while at_once > 1:
        at_once = -(-at_once // 4)
        config = replace(config, microbatch=at_once)
        yield f"microbatch={at_once}", copying(config, world).total


def memory_savings(config: RunConfig, found: ResourceEstimate, world: int) -> list[tuple[str, float]]:
    """Settings that take less, gentle ones first, and what each takes together with those before it."""
    told: list[tuple[str, float]] = []
    engine, optim, training = config.engine, config.optim, found.training
    if engine.memory == "keep":
        less = estimate_resources(replace(config, engine=replace(engine, memory="recompute")), world)
        found, training = less, less.training
        told.append(("engine.memory=recompute", less.total))
    if engine.trainable == "fp32" and engine.precision == "bf16" and not config.tuning.adapts:
        found = replace(found, weights=found.weights / 2, gradients=found.gradients / 2)
        told.append(("engine.trainable=bf16", found.total))
    if optim.moments != "int8":
        found = replace(
            found, moments=found.moments * OPTIMIZER_STATE_BYTES["int8"] / OPTIMIZER_STATE_BYTES[optim.moments]
        )
        told.append(("optim.moments=int8", found.total))
    micro = config.batch.microbatch or config.batch.prompts
    if micro > 1:
        fewer = max(1, network_batch_sizes(config, world).rollout // 2)
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
