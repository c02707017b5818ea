"""Measure where the seconds and the memory of a few real training steps go, and name the settings worth changing."""

from __future__ import annotations

import time
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

import torch
from torch import Tensor, nn

from ..config.engine_rules import check_rollout_precision
from ..config.schema import RunConfig
from ..core.registry import ConfigError
from ..core.reward import is_shipped
from ..core.weights import FrozenCopyWeights
from ..training.activation_memory import repeated_blocks
from ..training.distributed import local_shard
from ..training.loop import train_step
from ..training.low_precision_linear import RolloutLinear
from ..training.quantized_base import large_linear_layers
from ..training.run import Run
from .gpu_presets import match_device_name
from .plan import estimate_resources

PHASES = ("rollout", "reward", "update", "data", "waiting")
MAX_SUGGESTIONS = 3
LARGE_SHARE, FREE_SHARE, FULL_SHARE = 0.4, 0.4, 0.85  # of the time of a step; of the memory of the GPU


@dataclass(frozen=True)
class Profile:
    """What a training step takes on this process."""

    seconds: float  # median of the steps
    phases: Mapping[str, float]  # seconds by phase, of which `waiting` is that for rewards in threads
    memory: Mapping[str, float]  # bytes by part, between two steps
    peak_memory: float | None  # bytes on the GPU; None on other devices
    device_memory: float | None  # bytes that the GPU has
    flops: float | None  # of a step, by `plan`; None for models that it does not know
    peak_tflops: float | None = None  # of the GPU in bf16, by its data sheet; None for others, or in fp32 and tf32

    def share(self, phase: str) -> float:
        return self.phases.get(phase, 0.0) / self.seconds


@dataclass(frozen=True)
class Suggestion:
    """A setting to try, and why."""

    setting: str
    reason: str


def profile_run(
    run: Run, config: RunConfig, steps: int, trace: Path | None = None, progress: Callable[[], None] = lambda: None
) -> Profile:
    """Train `steps` steps after a first one that does not count; write a trace of one more for Perfetto.

    The weights change in memory only.
    """
    timed_step(run, 0)
    progress()
    if run.engine.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(run.engine.device)
    measured: list[tuple[float, Mapping[str, float]]] = []
    for step in range(1, steps + 1):
        measured.append(timed_step(run, step))
        progress()
    if trace is not None:
        write_trace(run, steps + 1, trace)
        progress()
    seconds = median(total for total, _ in measured)
    phases = {name: median(times.get(name, 0.0) for _, times in measured) for name in PHASES}
    device = run.engine.device
    on_gpu = device.type == "cuda"
    return Profile(
        seconds=seconds,
        phases=phases,
        memory=memory_by_part(run),
        peak_memory=float(torch.cuda.max_memory_allocated(device)) if on_gpu else None,
        device_memory=float(torch.cuda.get_device_properties(device).total_memory) if on_gpu else None,
        flops=planned_flops(config),
        peak_tflops=peak_tflops(run) if on_gpu else None,
    )


def peak_tflops(run: Run) -> float | None:
    """Return the published peak of a run's GPU, or None if the GPU is not known or multiplies in fp32 or tf32."""
    if run.engine.config.precision not in ("bf16", "fp16"):
        return None
    properties = torch.cuda.get_device_properties(run.engine.device)
    preset = match_device_name(properties.name, properties.total_memory / 2**30)
    return preset.peak_tflops if preset else None


def timed_step(run: Run, step: int) -> tuple[float, Mapping[str, float]]:
    """Train one step; return its seconds, and those of its phases."""
    synchronize(run.engine.device)
    started = time.perf_counter()
    metrics = train_step(run, step)
    synchronize(run.engine.device)
    total = time.perf_counter() - started
    timings = metrics.timings()
    waiting = timings.get("time/reward_wait", 0.0)
    phases = {name: timings.get(f"time/{name}", 0.0) for name in ("rollout", "reward", "update", "data")}
    return total, {**phases, "reward": phases["reward"] - waiting, "waiting": waiting}


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def write_trace(run: Run, step: int, path: Path) -> None:
    """Train one step under PyTorch's profiler and write a trace that https://ui.perfetto.dev opens."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    if run.engine.device.type == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities, acc_events=True) as profiler:
        timed_step(run, step)
    profiler.export_chrome_trace(str(path))


def memory_by_part(run: Run) -> dict[str, float]:
    """Bytes of what this process keeps on the device of the run between two steps."""
    weights, device = run.policy.weights, run.engine.device
    trainable, own = list(weights.trainable().values()), set(map(id, tensors_of(weights.net)))
    rollout_layers = [module for module in weights.net.modules() if isinstance(module, RolloutLinear)]
    frozen = [run.policy.model, weights.copies if isinstance(weights, FrozenCopyWeights) else ()]
    return {
        "weights": count_bytes(weights.net.parameters()),
        "gradients": count_bytes(trainable),
        "optimizer state": count_bytes(run.engine.optimizer.state_dict().values()),
        "snapshots": count_bytes(x for snapshot in weights.snapshot_tensors().values() for x in snapshot.values()),
        "copies of weights for rollouts": count_bytes(
            x for layer in rollout_layers for x in (layer.rollout_weight, layer.rollout_scale) if x is not None
        ),
        "autoencoder and other frozen networks": count_bytes(network_tensors(frozen, device, own)),
        "rewards": count_bytes(network_tensors(run.rubric, device, own)),
    }


def tensors_of(module: nn.Module) -> list[Tensor]:
    return [*module.parameters(), *module.buffers()]


def network_tensors(holder: object, device: torch.device, ignored: Container[int]) -> list[Tensor]:
    """Return parameters and buffers on a device of the networks that an object holds, each once.

    Ids in `ignored` are left out. Containers and objects of this package are searched.
    """
    found: dict[int, Tensor] = {}
    seen, waiting = set[int](), [holder]
    while waiting:
        each = waiting.pop()
        if id(each) in seen:
            continue
        seen.add(id(each))
        if isinstance(each, nn.Module):
            found |= {id(x): x for x in tensors_of(each)}
        elif isinstance(each, Mapping):
            waiting += each.values()
        elif isinstance(each, list | tuple):
            waiting += each
        elif is_shipped(each):
            waiting += getattr(each, "__dict__", {}).values()
    return [x for key, x in found.items() if key not in ignored and x.device.type == device.type]


def count_bytes(tensors: Iterable[Tensor]) -> float:
    """Bytes of tensors; of sharded ones, those on this rank."""
    return float(sum(x.numel() * x.element_size() for x in map(local_shard, tensors)))


def planned_flops(config: RunConfig) -> float | None:
    """Operations of a step by `plan`, or None for models that it does not know."""
    try:
        return estimate_resources(config).flops
    except ConfigError:
        return None


def suggest_settings(profile: Profile, run: Run, config: RunConfig) -> list[Suggestion]:
    """The settings most worth changing, the largest share of the step first; at most three."""
    found = sorted(find_suggestions(profile, run, config), key=lambda each: -each[0])
    return [suggestion for _, suggestion in found[:MAX_SUGGESTIONS]]


def find_suggestions(profile: Profile, run: Run, config: RunConfig) -> Iterator[tuple[float, Suggestion]]:
    """Yield settings with the share of the step or of the memory that they are about."""
    engine, batch, on_gpu = config.engine, config.batch, run.engine.device.type == "cuda"
    rollout, update, waiting = (profile.share(name) for name in ("rollout", "update", "waiting"))
    used = profile.peak_memory / profile.device_memory if profile.peak_memory and profile.device_memory else None
    has_room = used is not None and used < 1 - FREE_SHARE
    if on_gpu and run.engine.config.precision in ("fp32", "tf32"):
        yield 1.0, Suggestion("engine.precision=bf16", "the GPU multiplies 16-bit numbers several times as fast")
    if on_gpu and not engine.compile and len(repeated_blocks(run.policy.weights.net)) >= 8:
        yield (rollout + update) / 2, Suggestion("engine.compile=true", "the network has many equal blocks")
    if waiting >= 0.1:
        reason = f"the step waits for rewards in {waiting:.0%} of its time"
        yield waiting, Suggestion("rewards.NAME.device=cuda:1, or a reward server with replicas", reason)
    if engine.overlap_rewards == "never" and profile.share("reward") >= 0.1:
        yield profile.share("reward"), Suggestion("engine.overlap_rewards=auto", "rewards could score while sampling")
    low = f"engine.rollout_precision={'fp8' if on_gpu else 'int8'}"
    if on_gpu and rollout >= LARGE_SHARE and engine.rollout_precision == "same" and allows_low_precision(run, config):
        weighted = config.objective.uses_rollout_ratios()
        reason = "tokens are weighed by what rounding changes" if weighted else "no ratio depends on it"
        yield rollout, Suggestion(low, f"sampling takes {rollout:.0%} of the step, and {reason}")
    if rollout >= LARGE_SHARE and batch.rollout_batch_size and (has_room or not on_gpu):
        size = 2 * batch.rollout_batch_size
        yield rollout, Suggestion(f"batch.rollout_batch_size={size}", f"sampling takes {rollout:.0%} of the step")
    if update >= LARGE_SHARE and engine.activation_memory != "keep" and has_room:
        yield update, Suggestion("engine.activation_memory=keep", f"{1 - (used or 0):.0%} of the memory is free")
    if update >= LARGE_SHARE and batch.micro_batch_size and (has_room or not on_gpu):
        size = 2 * batch.micro_batch_size
        yield update, Suggestion(f"batch.micro_batch_size={size}", f"updates take {update:.0%} of the step")
    if used is not None and used > FULL_SHARE:
        setting = "engine.base_precision=int8" if config.tuning.is_adapter else "optim.state_dtype=int8"
        yield used - FULL_SHARE, Suggestion(setting, f"{used:.0%} of the GPU's memory is used")
    if profile.share("data") >= 0.1:
        yield profile.share("data"), Suggestion("tastemaker embed", "prompts or images are encoded in every step")


def allows_low_precision(run: Run, config: RunConfig) -> bool:
    """Whether 8-bit rollouts are possible with this configuration, and change a layer of the network."""
    changed = replace(config, engine=replace(config.engine, rollout_precision="fp8"))
    return check_rollout_precision(changed, 1) is None and bool(large_linear_layers(run.policy.weights.net))
