"""`engine.activation_memory: auto`: the fewest blocks whose activations are recomputed, so that a run fits its GPU."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache

import torch

from ..config.schema import AutoencoderRunConfig, EngineConfig, RunConfig
from ..core.registry import ConfigError
from ..training.activation_memory import resolve_without_plan
from ..training.engine import Engine
from .plan import ResourceEstimate
from .plan_cache import PlanCache, PlannedConfig

GIB = 2**30
USABLE_SHARE = 0.9  # of a GPU's memory: the rest is for CUDA, fragments and errors of the estimate
EstimatePlan = Callable[[PlannedConfig, int], ResourceEstimate]


@dataclass(frozen=True)
class MemoryChoice:
    """How a run keeps its activations, and why."""

    engine: EngineConfig
    fits: bool
    reason: str


def choose_block_count(total: Callable[[int], float], num_blocks: int, limit: float) -> int:
    """Return the fewest checkpointed blocks with which `total` is at most `limit`, or all if that is not enough.

    `total` must not grow with the count. Each call of it takes seconds, so the search interpolates: with equal blocks
    it needs four calls. Every third guess halves what is left, for blocks that differ much.
    """
    low, high = 0, num_blocks
    at_low = total(low)
    if at_low <= limit:
        return low
    at_high = total(high)
    guesses = 0
    while high - low > 1 and at_high <= limit:
        share = 0.5 if guesses % 3 == 2 else (at_low - limit) / (at_low - at_high)
        guess = min(max(low + math.ceil(share * (high - low)), low + 1), high - 1)
        value = total(guess)
        if value <= limit:
            high, at_high = guess, value
        else:
            low, at_low = guess, value
        guesses += 1
    return high


def with_checkpointed_blocks(engine: EngineConfig, count: int, num_blocks: int) -> EngineConfig:
    """Return the settings with which this many of the blocks are checkpointed."""
    if not count:
        return replace(engine, activation_memory="keep", checkpointed_blocks=None)
    blocks = None if count >= num_blocks else count
    return replace(engine, activation_memory="checkpoint", checkpointed_blocks=blocks)


def fit_activation_memory(
    config: PlannedConfig, gpu_bytes: float, world_size: int, estimate: EstimatePlan
) -> MemoryChoice:
    """Choose the fewest checkpointed blocks with which a run fits into a GPU, by its plan."""
    limit = USABLE_SHARE * gpu_bytes
    kept = estimate(replace(config, engine=with_checkpointed_blocks(config.engine, 0, 0)), world_size)
    num_blocks = kept.num_checkpoints

    @cache
    def total(count: int) -> float:
        if not count:
            return kept.total
        engine = with_checkpointed_blocks(config.engine, count, num_blocks)
        return estimate(replace(config, engine=engine), world_size).total

    count = choose_block_count(total, num_blocks, limit)
    planned = total(count)
    what = f"recompute {count} of {num_blocks} blocks" if count else "keep all activations"
    reason = f"{what}: {planned / GIB:.1f} GiB planned, {limit / GIB:.1f} usable of {gpu_bytes / GIB:.1f}"
    return MemoryChoice(with_checkpointed_blocks(config.engine, count, num_blocks), planned <= limit, reason)


def estimate_on_gpu(
    config: PlannedConfig, gpu_bytes: float, world_size: int, estimate: EstimatePlan
) -> ResourceEstimate:
    """Estimate a run on GPUs of this memory, which decides what `activation_memory: auto` is."""
    if config.engine.activation_memory == "auto":
        config = replace(config, engine=fit_activation_memory(config, gpu_bytes, world_size, estimate).engine)
    return estimate(config, world_size)


def choose_activation_memory(
    config: RunConfig | AutoencoderRunConfig, engine: Engine, estimate: EstimatePlan | None = None
) -> EngineConfig:
    """Resolve `activation_memory: auto` for an engine, the same on every rank; every rank must call this.

    Rank 0 measures the plan, and the GPU with the least memory decides. Devices other than CUDA keep all activations,
    and the networks that `plan` does not know save what they can.
    """
    if engine.device.type != "cuda":
        return resolve_without_plan(engine.config, engine.device)
    gpu_bytes = min(engine.comm.gather_objects([usable_gpu_bytes(engine.device)]))
    choices: list[MemoryChoice | None] = []
    if engine.comm.rank == 0:
        planned = replace(config, engine=engine.config)
        choices.append(_fit_if_known(planned, gpu_bytes, engine.comm.world_size, estimate or PlanCache().estimate))
    choice: MemoryChoice | None = engine.comm.gather_objects(choices)[0]
    if choice is None:
        return resolve_without_plan(engine.config, engine.device)
    if not choice.fits:
        warnings.warn(
            f"engine.activation_memory: auto would {choice.reason}, so the run may not fit; `tastemaker plan` lists "
            "settings that save more memory [TM2652]",
            stacklevel=2,
        )
    return choice.engine


def usable_gpu_bytes(device: torch.device) -> float:
    """Memory of a GPU, or the part of it that this process may use."""
    share = torch.cuda.get_per_process_memory_fraction(device)
    return float(torch.cuda.get_device_properties(device).total_memory * share)


def _fit_if_known(
    config: PlannedConfig, gpu_bytes: float, world_size: int, estimate: EstimatePlan
) -> MemoryChoice | None:
    try:
        return fit_activation_memory(config, gpu_bytes, world_size, estimate)
    except ConfigError:  # a toy or a network of the user's own
        return None
