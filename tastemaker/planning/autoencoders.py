"""What training an autoencoder will take: it and its critic, gone through with tensors that hold nothing."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from ..codec import CodecSpec, Drawing
from ..config.run import AutoencoderConfig
from ..patchgan import PatchGan
from ..perceptual import TINY, Perceptual, perceptual
from ..train import memory
from ..train.critic import ERRORS, PRICES
from ..train.device_precision import resolve_for_planning
from ..train.reconstruction import priced
from ..types import Placement
from .memory import MOMENTS, Peak, computed
from .models import replaced
from .tracing import flops, traced


def share(config: AutoencoderConfig, world: int = 1) -> int:
    """Rows of a backward pass on one rank."""
    rows = -(-config.rows // world)
    return min(rows, config.microbatch or rows)


def size(config: AutoencoderConfig) -> tuple[int, int]:
    """Height and width of the pictures, by the first of them."""
    pixels = config.data.load(config.seed).batch(0, 1, 0, 1).pixels
    return int(pixels.shape[-2]), int(pixels.shape[-1])


def anew(spec: CodecSpec) -> CodecSpec:
    """Without published weights, whose sizes those of the spec are."""
    known: Any = spec
    started = "weights" in {field.name for field in fields(known)}
    return replace(known, weights=None) if started else spec


class Copying:
    """The networks of a run without their numbers, and what they do with pictures."""

    def __init__(self, config: AutoencoderConfig, pixels: tuple[int, int]) -> None:
        self.config, self.pixels = config, pixels
        self.net = anew(config.autoencoder).load(Placement())
        told = config.critic
        self.critic = None if told is None else PatchGan(told.width, told.layers, tail=told.tail)
        self.lpips: Perceptual | None = None
        if config.loss.lpips:
            whole = Perceptual().eval().requires_grad_(False)
            self.lpips = perceptual(TINY, "", Placement()) if config.loss.vgg == TINY else whole

    def trained(self) -> list[nn.Parameter]:
        return [p for p in self.net.parameters() if p.requires_grad]

    def pictures(self, rows: int) -> Tensor:
        return torch.empty(rows, 3, *self.pixels)

    def copy(self, rows: int) -> None:
        """Copies, what they cost, and the way back."""
        computed(self.config.engine, lambda: self._cost(self.pictures(rows))).backward()

    def _cost(self, pixels: Tensor) -> Tensor:
        given = (torch.empty(len(pixels), *self.net.chances(pixels)),) if isinstance(self.net, Drawing) else ()
        made, extra = self.net(pixels, *given)
        loss = priced(self.config.loss, made.float(), pixels, self.lpips).rows + extra
        if self.critic is not None and self.config.critic is not None:
            self.critic.requires_grad_(False)
            loss = loss + PRICES[self.config.critic.deceive](self.critic(made.float()))
            self.critic.requires_grad_(True)
        total: Tensor = loss.sum()
        return total

    def judge(self, rows: int) -> None:
        """What the critic learns of pictures and their copies."""
        if self.critic is not None and self.config.critic is not None:
            critic, error = self.critic, ERRORS[self.config.critic.loss]
            seen = [self.pictures(rows), self.pictures(rows)]
            computed(self.config.engine, lambda: error(*(critic(x) for x in seen)).sum()).backward()


def peak(config: AutoencoderConfig, world: int = 1) -> Peak:
    """Of a run on so many ranks, once the critic plays its part; sharded where the run is."""
    config = replace(config, engine=resolve_for_planning(config.engine)[0])
    rows, pixels = share(config, world), size(config)
    with FakeTensorMode(allow_non_fake_inputs=True), replaced():
        run = Copying(config, pixels)
        if config.engine.memory == "recompute":
            memory.recompute(run.net)
        own, critic = run.trained(), [] if run.critic is None else [*run.critic.parameters()]
        frozen = [] if run.lpips is None else [*run.lpips.parameters()]
        for p in (*own, *critic):
            p.grad = torch.empty_like(p)
        known = [*run.net.parameters(), *run.net.buffers(), *critic, *frozen, *(p.grad for p in (*own, *critic))]
        learning = traced(lambda: run.copy(rows), known)
        judging = traced(lambda: run.judge(rows), known)
        work = flops(lambda: run.copy(1)) + flops(lambda: run.judge(1))
        trained, judged = (sum(p.numel() for p in found) for found in (own, critic))
        kept = sum(x.numel() * x.itemsize for x in (*run.net.buffers(), *frozen))
    engine = config.engine
    shards = 1 if engine.strategy == "replicated" else world // (engine.replicas if engine.strategy == "hsdp" else 1)
    return Peak(
        weights=4 * trained / shards + 4 * judged,
        gradients=4 * trained / shards + 4 * judged,
        moments=MOMENTS[config.optim.moments] * (trained / shards + judged),
        snapshots=4 * trained / shards if config.ema else 0.0,
        frozen=kept,
        cache=0.0,
        rollout=judging,
        training=learning if engine.memory != "offload" else learning / 2,
        sampling=0.0,
        learning=work * config.rows / world,
        moved=0.0,
    )
