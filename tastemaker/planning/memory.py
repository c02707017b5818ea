"""What a run will take of a GPU's memory, and how long a step will be, before anything is loaded."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..config.run import EngineConfig, RunConfig
from ..train import memory, precision
from ..weights import Full
from .models import Model, imagined
from .tracing import flops, traced

HOST = torch.device("cpu")
MOMENTS = {"fp32": 8.0, "bf16": 4.0, "int8": 2 + 8 / 256}  # bytes a weight
EYES = {"hidden_size": 1280, "intermediate_size": 5120, "num_hidden_layers": 32, "num_attention_heads": 16}


@dataclass(frozen=True)
class Peak:
    """Bytes on one GPU at the worst moment, and operations of a step on one rank."""

    weights: float
    gradients: float
    moments: float
    snapshots: float
    frozen: float  # autoencoder and rewards
    rollout: float  # activations while sampling
    training: float  # activations of a forward and a backward pass
    work: float  # floating-point operations

    @property
    def total(self) -> float:
        kept = self.weights + self.gradients + self.moments + self.snapshots + self.frozen
        # No gradient is there while sampling, but allocations of both are seldom interleaved.
        return kept + max(self.training, self.rollout)


@dataclass(frozen=True)
class Rows:
    """How many rows the network sees at once on one rank, guidance and branches included."""

    rollout: int
    training: int


def rows(config: RunConfig, world: int = 1) -> Rows:
    batch, objective = config.batch, config.objective
    guided = 2 if config.guidance is not None and config.guidance.scale != 1 else 1
    share = -(-batch.prompts // world)
    samples = share * objective.group
    trained = -(-share * objective.kept_rows() // batch.updates)
    return Rows(
        guided * min(samples, batch.rollout or samples),
        guided * objective.rows_at_once() * min(trained, batch.microbatch or trained),
    )


def peak(config: RunConfig, world: int = 1) -> Peak:
    """Of a run on so many ranks; sharded where the run is."""
    with imagined(config) as model:
        weights = config.tuning.apply(model.backbone, ())
        net, trainable = weights.net, list(weights.trainable().values())
        trained, whole = sum(p.numel() for p in trainable), sum(p.numel() for p in net.parameters())
        at_once = rows(config, world)
        engine = config.engine
        if engine.memory == "recompute":
            memory.recompute(net)
        known = [*net.parameters(), *model.backbone.codec.net.parameters()]
        for p in trainable:
            p.grad = torch.empty_like(p)
        known += [p.grad for p in trainable]
        rollout = traced(lambda: _sample(model, engine, at_once.rollout), known)
        eyes = _judge(model, config)
        known += [] if eyes is None else [*eyes.parameters()]
        training = traced(lambda: _learn(model, config, at_once.training, eyes), known)
        single = flops(lambda: _sample(model, engine, 1))
        frozen = sum(p.numel() * p.itemsize for p in model.backbone.codec.net.parameters())
    shards = 1 if engine.strategy == "replicated" else world // (engine.replicas if engine.strategy == "hsdp" else 1)
    size = precision.DTYPES[engine.trainable].itemsize
    base = whole * size if not config.tuning.adapts else (whole - trained) * model.dtype.itemsize + trained * size
    return Peak(
        base / shards,
        trained * size / shards,
        trained * MOMENTS[config.optim.moments] / shards,
        _snapshots(config, trained, size) / shards,
        frozen + _rewards(config),
        rollout,
        training if engine.memory != "offload" else training / 2,
        single * _passes(config, world),
    )


def _sample(model: Model, engine: EngineConfig, rows: int) -> None:
    with torch.no_grad():
        _computed(engine, lambda: _predict(model, rows))


def _learn(model: Model, config: RunConfig, rows: int, eyes: nn.Module | None) -> None:
    def loss() -> Tensor:
        made = _predict(model, rows)
        return _judged(model, eyes, made) if config.objective.needs_gradient else made.mean()

    value = _computed(config.engine, loss)
    with precision.mathematics(config.engine, HOST):
        value.backward()


def _judge(model: Model, config: RunConfig) -> nn.Module | None:
    """Eyes as large as those of HPS and PickScore, where pictures are judged by a network of any size."""
    if not any("GB" in reward.spec.about.memory for reward in config.rewards.values()):
        return None
    from transformers import CLIPVisionConfig, CLIPVisionModel

    before = torch.get_default_dtype()
    torch.set_default_dtype(model.dtype)
    try:
        eyes: Any = CLIPVisionModel(CLIPVisionConfig(**EYES, image_size=224, patch_size=14))  # type: ignore[arg-type]
    finally:
        torch.set_default_dtype(before)
    found: nn.Module = eyes.requires_grad_(False)
    return found


def _judged(model: Model, eyes: Any, made: Tensor) -> Tensor:
    """What pictures earn."""
    pixels: Tensor = model.backbone.decode(made)
    if eyes is None:
        return pixels.mean()
    small = functional.interpolate(pixels[:, 0], (224, 224)).to(model.dtype)
    with torch.autocast("cpu", enabled=False):
        earned: Tensor = eyes(small).pooler_output
    return earned.float().mean()


def _predict(model: Model, rows: int) -> Tensor:
    backbone = model.backbone
    x, t = torch.empty(rows, *backbone.shape), torch.empty(rows)
    found: Tensor = backbone.predict(x, t, model.condition(rows))
    return found.float()


def _computed(engine: EngineConfig, work: Callable[[], Any]) -> Any:
    with ExitStack() as stack:
        stack.enter_context(precision.mathematics(engine, HOST))
        stack.enter_context(precision.casting(engine, HOST))
        return work()


def _snapshots(config: RunConfig, trained: int, size: int) -> float:
    names = [*config.objective.snapshots(), *(["ema"] if config.ema else [])]
    if isinstance(config.tuning, Full) and config.tuning.host:
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


def _passes(config: RunConfig, world: int) -> float:
    """Forward passes of one row that a step on one rank is worth."""
    batch, objective = config.batch, config.objective
    share = batch.prompts / world
    guided = 2 if config.guidance is not None and config.guidance.scale != 1 else 1
    sampled = share * objective.calls(config.process.calls(config.model.shape)) * guided
    # Backward passes cost two, or one where the weights need no gradient, and one more to compute the forward again.
    backward = (1 if config.tuning.adapts else 2) + 1 + (config.engine.memory == "recompute")
    graphs = objective.gradients(config.process.decisions(config.model.shape))
    return sampled + share * objective.kept_rows() * batch.epochs * graphs * backward * guided
