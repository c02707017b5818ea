"""Estimate GPU memory and step time of a run before any weight is loaded."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..config.schema import EngineConfig, RunConfig
from ..core.weights import FullFinetuning
from ..objectives.frame_selection import select_frames
from ..objectives.reward_gradient import RewardGradient
from ..training import activation_memory, precision
from ..training.device_precision import resolve_for_planning
from .fake_models import FakeModel, fake_model
from .tracing import count_flops, trace_peak_bytes

CPU_DEVICE = torch.device("cpu")
OPTIMIZER_STATE_BYTES = {"fp32": 8.0, "bf16": 4.0, "int8": 2 + 8 / 256}  # bytes a weight
REFERENCES = ("reference", "round")  # snapshots that every graph is compared with
CLIP_VISION_CONFIG = {
    "hidden_size": 1280,
    "intermediate_size": 5120,
    "num_hidden_layers": 32,
    "num_attention_heads": 16,
}


@dataclass(frozen=True)
class ResourceEstimate:
    """Bytes on one GPU at the worst moment, and operations of a step on one rank."""

    weights: float
    gradients: float
    moments: float
    snapshots: float
    frozen: float  # autoencoder and rewards
    cache: float  # of keys and values that writing keeps, with weights copied for it
    rollout: float  # activations while sampling
    training: float  # activations of a forward and a backward pass
    sampling: float  # floating-point operations
    learning: float  # likewise
    moved: float  # bytes that sampling reads, where it waits for memory rather than for arithmetic

    @property
    def work(self) -> float:
        return self.sampling + self.learning

    def seconds(self, rate: float, bandwidth: float) -> float:
        """Of a step, at so many operations and bytes a second."""
        return max(self.sampling / rate, self.moved / bandwidth) + self.learning / rate

    @property
    def total(self) -> float:
        kept = self.weights + self.gradients + self.moments + self.snapshots + self.frozen + self.cache
        # No gradient is there while sampling, but allocations of both are seldom interleaved.
        return kept + max(self.training, self.rollout)


@dataclass(frozen=True)
class NetworkBatchSizes:
    """How many rows the network sees at once on one rank, guidance and branches included."""

    rollout: int
    training: int


def network_batch_sizes(config: RunConfig, world: int = 1) -> NetworkBatchSizes:
    batch, objective = config.batch, config.objective
    share = -(-batch.prompts // world)
    samples = share * objective.group
    trained = -(-share * objective.kept_rows() // batch.updates)
    guided, scored = guidance_factors(config)
    return NetworkBatchSizes(
        guided * min(samples, batch.rollout or samples),
        scored * objective.rows_at_once() * min(trained, batch.microbatch or trained),
    )


def guidance_factors(config: RunConfig) -> tuple[int, int]:
    """Rows the network sees for each that is sampled, and for each that is learned from."""
    guided = 2 if config.guidance is not None and config.guidance.scale != 1 else 1
    return guided, 1 if config.guidance is not None and config.guidance.rollouts_only else guided


def estimate_resources(config: RunConfig, world: int = 1) -> ResourceEstimate:
    """Of a run on so many ranks; sharded where the run is."""
    config = replace(config, engine=resolve_for_planning(config.engine)[0])
    with fake_model(config, world) as model:
        weights = config.tuning.apply(model.backbone, ())
        net, trainable = weights.net, list(weights.trainable().values())
        trained, whole = sum(p.numel() for p in trainable), sum(p.numel() for p in net.parameters())
        at_once, engine = network_batch_sizes(config, world), config.engine
        if engine.memory == "recompute":
            activation_memory.checkpoint_activations(net)
        known: list[Tensor | None] = [*net.parameters(), *model.frozen()]
        for p in trainable:
            p.grad = torch.empty_like(p)
        known += [p.grad for p in trainable]
        made = config.objective.samples()
        held = model.held(at_once.rollout, config.tuning.adapts) if made else []
        known += held
        # Those who learn from data still ask the reference.
        rollout = trace_peak_bytes(
            lambda: _call_without_grad(engine, model.sample if made else model.score, at_once.rollout), known
        )
        share = -(-config.batch.prompts // world)
        rollout = max(rollout, trace_peak_bytes(lambda: _call_without_grad(engine, model.read, share), known))
        eyes = _fake_reward_tower(config)
        known += [] if eyes is None else [*eyes.parameters()]
        training = trace_peak_bytes(lambda: _learn(model, config, at_once.training, eyes), known)
        call, graph = (
            count_flops(lambda: _call_without_grad(engine, model.call)),
            count_flops(lambda: _call_without_grad(engine, model.score, 1)),
        )
        cache, frozen = (sum(x.numel() * x.itemsize for x in kept) for kept in (held, model.frozen()))
        sampling, learning = _step_flops(model, config, world, call, graph)
        sampling += config.batch.prompts / world * count_flops(lambda: _call_without_grad(engine, model.read, 1))
        moved = model.moved(config.batch.prompts / world * made, at_once.rollout)
    return ResourceEstimate(
        *_parameter_bytes(config, world, whole, trained),
        frozen + _rewards(config),
        cache,
        rollout,
        training if engine.memory != "offload" else training / 2,
        sampling,
        learning,
        moved,
    )


def _parameter_bytes(config: RunConfig, world: int, whole: int, trained: int) -> tuple[float, float, float, float]:
    """Bytes of weights, gradients, moments and snapshots on one rank."""
    engine = config.engine
    size = precision.DTYPES[engine.trainable].itemsize
    shards = 1 if engine.strategy == "replicated" else world // (engine.replicas if engine.strategy == "hsdp" else 1)
    base = (
        whole * size
        if not config.tuning.adapts
        else (whole - trained) * _frozen_dtype(config).itemsize + trained * size
    )
    moments, snapshots = trained * OPTIMIZER_STATE_BYTES[config.optim.moments], _snapshots(config, trained, size)
    return base / shards, trained * size / shards, moments / shards, snapshots / shards


def _call_without_grad(engine: EngineConfig, work: Callable[..., Any], *rows: int) -> None:
    with torch.no_grad():
        run_under_autocast(engine, lambda: work(*rows))


def _learn(model: FakeModel, config: RunConfig, rows: int, eyes: nn.Module | None) -> None:
    def loss() -> Tensor:
        made = model.score(rows)
        return _reward_output(model, config, eyes, made) if config.objective.needs_gradient else made.mean()

    value = run_under_autocast(config.engine, loss)
    with precision.compute_settings(config.engine, CPU_DEVICE):
        value.backward()


def _frozen_dtype(config: RunConfig) -> torch.dtype:
    """What is frozen is held in."""
    return torch.bfloat16 if config.engine.precision in ("bf16", "fp16") else torch.float32


def _fake_reward_tower(config: RunConfig) -> nn.Module | None:
    """Eyes as large as those of HPS and PickScore, where pictures are judged by a network of any size."""
    if not any("GB" in reward.spec.about.memory for reward in config.rewards.values()):
        return None
    from transformers import CLIPVisionConfig, CLIPVisionModel

    before = torch.get_default_dtype()
    torch.set_default_dtype(_frozen_dtype(config))
    try:
        eyes: Any = CLIPVisionModel(CLIPVisionConfig(**CLIP_VISION_CONFIG, image_size=224, patch_size=14))  # type: ignore[arg-type]
    finally:
        torch.set_default_dtype(before)
    found: nn.Module = eyes.requires_grad_(False)
    return found


def _reward_output(model: FakeModel, config: RunConfig, eyes: Any, made: Tensor) -> Tensor:
    """What pictures earn."""
    one = made[: len(made) // guidance_factors(config)[1]]  # which guidance made of two
    pixels: Tensor = model.backbone.decode(one, _decoded_frames(config))
    if eyes is None:
        return pixels.mean()
    small = functional.interpolate(pixels[:, 0], (224, 224)).to(_frozen_dtype(config))
    with torch.autocast("cpu", enabled=False):
        earned: Tensor = eyes(small).pooler_output
    return earned.float().mean()


def _decoded_frames(config: RunConfig) -> list[int] | None:
    """The frames that are decoded for rewards; of those drawn at random the last, which takes most latents."""
    objective, count = config.objective, config.model.frames
    if not isinstance(objective, RewardGradient):
        return None
    return [count - 1] if objective.frames == "random" else select_frames(objective.frames, count)


def run_under_autocast(engine: EngineConfig, work: Callable[[], Any]) -> Any:
    with ExitStack() as stack:
        stack.enter_context(precision.compute_settings(engine, CPU_DEVICE))
        stack.enter_context(precision.autocast(engine, CPU_DEVICE))
        return work()


def _snapshots(config: RunConfig, trained: int, size: int) -> float:
    names = [*config.objective.snapshots(), *(["ema"] if config.ema else [])]
    if isinstance(config.tuning, FullFinetuning) and config.tuning.host:
        return 0.0
    kept = [name for name in names if not (config.tuning.adapts and name == "reference")]
    return float(sum(trained * (size if name == "reference" else 4) for name in kept))


def _rewards(config: RunConfig) -> float:
    """As each says of itself."""
    half = 0.5 if config.engine.precision in ("bf16", "fp16") else 1.0
    units = {"GB": 1e9, "MB": 1e6}
    found = 0.0
    for reward in config.rewards.values():
        told = re.search(r"([\d.]+) (GB|MB)", reward.spec.about.memory)
        if told and reward.spec.runs_on == "device":
            found += float(told[1]) * units[told[2]] * (half if "half of it" in reward.spec.about.memory else 1.0)
    return found


def _step_flops(model: FakeModel, config: RunConfig, world: int, call: float, graph: float) -> tuple[float, float]:
    """Operations of a step on one rank, sampling and learning, by those of one row's call and of one's scoring."""
    batch, objective = config.batch, config.objective
    share, (guided, scored) = batch.prompts / world, guidance_factors(config)
    each = config.process.calls(config.model.shape)
    again = model.again(each) if objective.replays() else 0
    sampling = share * (objective.calls(each) * guided * call + objective.samples() * again * graph)
    # Backward passes cost two, or one where the weights need no gradient, and one more to compute the forward again.
    backward = (1 if config.tuning.adapts else 2) + 1 + (config.engine.memory == "recompute")
    backward += not {*objective.snapshots()}.isdisjoint(REFERENCES)
    graphs = objective.gradients(config.process.decisions(config.model.shape))
    return sampling, share * objective.kept_rows() * batch.epochs * graphs * backward * scored * graph
