"""What training an autoencoder will take: it and its critic, gone through with tensors that hold nothing."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from ..autoencoders.discriminator import DISCRIMINATOR_LOSSES, GENERATOR_LOSSES
from ..autoencoders.lpips import TINY, LPIPSDistance, load_lpips
from ..autoencoders.patchgan import PatchGANDiscriminator
from ..autoencoders.reconstruction_loss import reconstruction_loss
from ..config.schema import AutoencoderRunConfig
from ..core.autoencoder import AutoencoderSpec, SupportsLatentNoise
from ..core.types import Placement
from ..training import activation_memory
from ..training.device_precision import resolve_for_planning
from .fake_models import allow_fake_apply
from .resource_plan import OPTIMIZER_STATE_BYTES, ResourceEstimate, run_under_autocast
from .tracing import count_flops, trace_peak_bytes


def micro_batch_per_rank(config: AutoencoderRunConfig, world: int = 1) -> int:
    """Rows of a backward pass on one rank."""
    rows = -(-config.rows // world)
    return min(rows, config.microbatch or rows)


def image_size(config: AutoencoderRunConfig) -> tuple[int, int]:
    """Height and width of the pictures, by the first of them."""
    pixels = config.data.load(config.seed).batch(0, 1, 0, 1).pixels
    return int(pixels.shape[-2]), int(pixels.shape[-1])


def without_weights(spec: AutoencoderSpec) -> AutoencoderSpec:
    """Without published weights, whose sizes those of the spec are."""
    known: Any = spec
    started = "weights" in {field.name for field in fields(known)}
    return replace(known, weights=None) if started else spec


class FakeAutoencoder:
    """The networks of a run without their numbers, and what they do with pictures."""

    def __init__(self, config: AutoencoderRunConfig, pixels: tuple[int, int]) -> None:
        self.config, self.pixels = config, pixels
        self.net = without_weights(config.autoencoder).load(Placement())
        told = config.critic
        self.critic = None if told is None else PatchGANDiscriminator(told.width, told.layers, tail=told.tail)
        self.lpips: LPIPSDistance | None = None
        if config.loss.lpips:
            whole = LPIPSDistance().eval().requires_grad_(False)
            self.lpips = load_lpips(TINY, "", Placement()) if config.loss.vgg == TINY else whole

    def trained(self) -> list[nn.Parameter]:
        return [p for p in self.net.parameters() if p.requires_grad]

    def pictures(self, rows: int) -> Tensor:
        return torch.empty(rows, 3, *self.pixels)

    def copy(self, rows: int) -> None:
        """Copies, what they cost, and the way back."""
        run_under_autocast(self.config.engine, lambda: self._cost(self.pictures(rows))).backward()

    def _cost(self, pixels: Tensor) -> Tensor:
        given = (
            (torch.empty(len(pixels), *self.net.chances(pixels)),) if isinstance(self.net, SupportsLatentNoise) else ()
        )
        made, extra = self.net(pixels, *given)
        loss = reconstruction_loss(self.config.loss, made.float(), pixels, self.lpips).rows + extra
        if self.critic is not None and self.config.critic is not None:
            self.critic.requires_grad_(False)
            loss = loss + GENERATOR_LOSSES[self.config.critic.deceive](self.critic(made.float()))
            self.critic.requires_grad_(True)
        total: Tensor = loss.sum()
        return total

    def judge(self, rows: int) -> None:
        """What the critic learns of pictures and their copies."""
        if self.critic is not None and self.config.critic is not None:
            critic, error = self.critic, DISCRIMINATOR_LOSSES[self.config.critic.loss]
            seen = [self.pictures(rows), self.pictures(rows)]
            run_under_autocast(self.config.engine, lambda: error(*(critic(x) for x in seen)).sum()).backward()


def estimate_autoencoder_resources(config: AutoencoderRunConfig, world: int = 1) -> ResourceEstimate:
    """Of a run on so many ranks, once the critic plays its part; sharded where the run is."""
    config = replace(config, engine=resolve_for_planning(config.engine)[0])
    rows, pixels = micro_batch_per_rank(config, world), image_size(config)
    with FakeTensorMode(allow_non_fake_inputs=True), allow_fake_apply():
        run = FakeAutoencoder(config, pixels)
        if config.engine.memory == "recompute":
            activation_memory.checkpoint_activations(run.net)
        own, critic = run.trained(), [] if run.critic is None else [*run.critic.parameters()]
        frozen = [] if run.lpips is None else [*run.lpips.parameters()]
        for p in (*own, *critic):
            p.grad = torch.empty_like(p)
        known = [*run.net.parameters(), *run.net.buffers(), *critic, *frozen, *(p.grad for p in (*own, *critic))]
        learning = trace_peak_bytes(lambda: run.copy(rows), known)
        judging = trace_peak_bytes(lambda: run.judge(rows), known)
        work = count_flops(lambda: run.copy(1)) + count_flops(lambda: run.judge(1))
        trained, judged = (sum(p.numel() for p in found) for found in (own, critic))
        kept = sum(x.numel() * x.itemsize for x in (*run.net.buffers(), *frozen))
    engine = config.engine
    shards = 1 if engine.strategy == "replicated" else world // (engine.replicas if engine.strategy == "hsdp" else 1)
    return ResourceEstimate(
        weights=4 * trained / shards + 4 * judged,
        gradients=4 * trained / shards + 4 * judged,
        moments=OPTIMIZER_STATE_BYTES[config.optim.moments] * (trained / shards + judged),
        snapshots=4 * trained / shards if config.ema else 0.0,
        frozen=kept,
        cache=0.0,
        rollout=judging,
        training=learning if engine.memory != "offload" else learning / 2,
        sampling=0.0,
        learning=work * config.rows / world,
        moved=0.0,
    )
