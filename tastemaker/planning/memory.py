"""What a run will take of a GPU's memory, and how long a step will be, before anything is loaded."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..config.run import EngineConfig, RunConfig
from ..objectives.frames import pick
from ..objectives.reward_gradient import RewardGradient
from ..train import memory, precision
from ..train.device_precision import resolve_for_planning
from ..weights import Full
from .models import Model, imagined
from .tracing import flops, traced

HOST = torch.device("cpu")
MOMENTS = {"fp32": 8.0, "bf16": 4.0, "int8": 2 + 8 / 256}  # bytes a weight
REFERENCES = ("reference", "round")  # snapshots that every graph is compared with
EYES = {"hidden_size": 1280, "intermediate_size": 5120, "num_hidden_layers": 32, "num_attention_heads": 16}


@dataclass(frozen=True)
class Peak:
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
class Rows:
    """How many rows the network sees at once on one rank, guidance and branches included."""

    rollout: int
    training: int


def rows(config: RunConfig, world: int = 1) -> Rows:
    batch, objective = config.batch, config.objective
    share = -(-batch.prompts // world)
    samples = share * objective.group
    trained = -(-share * objective.kept_rows() // batch.updates)
    guided, scored = halves(config)
    return Rows(
        guided * min(samples, batch.rollout or samples),
        scored * objective.rows_at_once() * min(trained, batch.microbatch or trained),
    )


def halves(config: RunConfig) -> tuple[int, int]:
    """Rows the network sees for each that is sampled, and for each that is learned from."""
    guided = 2 if config.guidance is not None and config.guidance.scale != 1 else 1
    return guided, 1 if config.guidance is not None and config.guidance.rollouts_only else guided


def peak(config: RunConfig, world: int = 1) -> Peak:
    """Of a run on so many ranks; sharded where the run is."""
    config = replace(config, engine=resolve_for_planning(config.engine)[0])
    with imagined(config, world) as model:
        weights = config.tuning.apply(model.backbone, ())
        net, trainable = weights.net, list(weights.trainable().values())
        trained, whole = sum(p.numel() for p in trainable), sum(p.numel() for p in net.parameters())
        at_once, engine = rows(config, world), config.engine
        if engine.memory == "recompute":
            memory.recompute(net)
        known: list[Tensor | None] = [*net.parameters(), *model.frozen()]
        for p in trainable:
            p.grad = torch.empty_like(p)
        known += [p.grad for p in trainable]
        made = config.objective.samples()
        held = model.held(at_once.rollout, config.tuning.adapts) if made else []
        known += held
        # Those who learn from data still ask the reference.
        rollout = traced(lambda: _asked(engine, model.sample if made else model.score, at_once.rollout), known)
        share = -(-config.batch.prompts // world)
        rollout = max(rollout, traced(lambda: _asked(engine, model.read, share), known))
        eyes = _judge(config)
        known += [] if eyes is None else [*eyes.parameters()]
        training = traced(lambda: _learn(model, config, at_once.training, eyes), known)
        call, graph = flops(lambda: _asked(engine, model.call)), flops(lambda: _asked(engine, model.score, 1))
        cache, frozen = (sum(x.numel() * x.itemsize for x in kept) for kept in (held, model.frozen()))
        sampling, learning = _work(model, config, world, call, graph)
        sampling += config.batch.prompts / world * flops(lambda: _asked(engine, model.read, 1))
        moved = model.moved(config.batch.prompts / world * made, at_once.rollout)
    return Peak(
        *_carried(config, world, whole, trained),
        frozen + _rewards(config),
        cache,
        rollout,
        training if engine.memory != "offload" else training / 2,
        sampling,
        learning,
        moved,
    )


def _carried(config: RunConfig, world: int, whole: int, trained: int) -> tuple[float, float, float, float]:
    """Bytes of weights, gradients, moments and snapshots on one rank."""
    engine = config.engine
    size = precision.DTYPES[engine.trainable].itemsize
    shards = 1 if engine.strategy == "replicated" else world // (engine.replicas if engine.strategy == "hsdp" else 1)
    base = whole * size if not config.tuning.adapts else (whole - trained) * _half(config).itemsize + trained * size
    moments, snapshots = trained * MOMENTS[config.optim.moments], _snapshots(config, trained, size)
    return base / shards, trained * size / shards, moments / shards, snapshots / shards


def _asked(engine: EngineConfig, work: Callable[..., Any], *rows: int) -> None:
    with torch.no_grad():
        computed(engine, lambda: work(*rows))


def _learn(model: Model, config: RunConfig, rows: int, eyes: nn.Module | None) -> None:
    def loss() -> Tensor:
        made = model.score(rows)
        return _judged(model, config, eyes, made) if config.objective.needs_gradient else made.mean()

    value = computed(config.engine, loss)
    with precision.mathematics(config.engine, HOST):
        value.backward()


def _half(config: RunConfig) -> torch.dtype:
    """What is frozen is held in."""
    return torch.bfloat16 if config.engine.precision in ("bf16", "fp16") else torch.float32


def _judge(config: RunConfig) -> nn.Module | None:
    """Eyes as large as those of HPS and PickScore, where pictures are judged by a network of any size."""
    if not any("GB" in reward.spec.about.memory for reward in config.rewards.values()):
        return None
    from transformers import CLIPVisionConfig, CLIPVisionModel

    before = torch.get_default_dtype()
    torch.set_default_dtype(_half(config))
    try:
        eyes: Any = CLIPVisionModel(CLIPVisionConfig(**EYES, image_size=224, patch_size=14))  # type: ignore[arg-type]
    finally:
        torch.set_default_dtype(before)
    found: nn.Module = eyes.requires_grad_(False)
    return found


def _judged(model: Model, config: RunConfig, eyes: Any, made: Tensor) -> Tensor:
    """What pictures earn."""
    one = made[: len(made) // halves(config)[1]]  # which guidance made of two
    pixels: Tensor = model.backbone.decode(one, _shown(config))
    if eyes is None:
        return pixels.mean()
    small = functional.interpolate(pixels[:, 0], (224, 224)).to(_half(config))
    with torch.autocast("cpu", enabled=False):
        earned: Tensor = eyes(small).pooler_output
    return earned.float().mean()


def _shown(config: RunConfig) -> list[int] | None:
    """The frames that are decoded for rewards; of those drawn at random the last, which takes most latents."""
    objective, count = config.objective, config.model.frames
    if not isinstance(objective, RewardGradient):
        return None
    return [count - 1] if objective.frames == "random" else pick(objective.frames, count)


def computed(engine: EngineConfig, work: Callable[[], Any]) -> Any:
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


def _work(model: Model, config: RunConfig, world: int, call: float, graph: float) -> tuple[float, float]:
    """Operations of a step on one rank, sampling and learning, by those of one row's call and of one's scoring."""
    batch, objective = config.batch, config.objective
    share, (guided, scored) = batch.prompts / world, halves(config)
    each = config.process.calls(config.model.shape)
    again = model.again(each) if objective.replays() else 0
    sampling = share * (objective.calls(each) * guided * call + objective.samples() * again * graph)
    # Backward passes cost two, or one where the weights need no gradient, and one more to compute the forward again.
    backward = (1 if config.tuning.adapts else 2) + 1 + (config.engine.memory == "recompute")
    backward += not {*objective.snapshots()}.isdisjoint(REFERENCES)
    graphs = objective.gradients(config.process.decisions(config.model.shape))
    return sampling, share * objective.kept_rows() * batch.epochs * graphs * backward * scored * graph
