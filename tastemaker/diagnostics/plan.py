"""Estimate GPU memory and step time of a run before any weight is loaded, and settings that save memory."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from ..autoencoders.discriminator import DISCRIMINATOR_LOSSES, GENERATOR_LOSSES
from ..autoencoders.lpips import TINY, LPIPSDistance, load_lpips
from ..autoencoders.patchgan import PatchGANDiscriminator
from ..autoencoders.reconstruction_loss import reconstruction_loss
from ..config.engine_rules import check_base_precision
from ..config.schema import AutoencoderRunConfig, EngineConfig, RunConfig
from ..config.step_counts import compute_step_counts
from ..core.autoencoder import AutoencoderSpec, as_autoencoder
from ..core.types import Placement
from ..core.weights import FullFinetuning
from ..objectives.srpo import SRPO
from ..training import activation_memory, precision
from ..training.device_precision import resolve_for_planning
from .fake_backbones import fake_modules
from .fake_memory import count_flops, trace_peak_bytes
from .fake_run import Measurement, frozen_dtype, measure, run_under_autocast

OPTIMIZER_STATE_BYTES = {"fp32": 8.0, "bf16": 4.0, "int8": 2 + 8 / 256}  # per weight
LORA_SHARE = 0.02  # rough share of weights that LoRA trains
RANK_COUNTS = (2, 4, 8, 16, 32, 64)  # numbers of GPUs that FSDP is suggested for
MIN_FRAMES = 4  # of videos that are suggested to be shortened
EMBED_BEFOREHAND = "model.embeddings=embeddings"  # the folder that `tastemaker embed` writes
Saving = tuple[str, float]  # overrides, and the total memory with them and all before
EstimateFn = Callable[[RunConfig, int], "ResourceEstimate"]


@dataclass(frozen=True)
class ResourceEstimate:
    """Bytes on one GPU by purpose, and the work of a step on one rank."""

    weights: float
    gradients: float
    optimizer_state: float
    snapshots: float
    frozen: float  # autoencoder and rewards; LPIPS of an autoencoder's run
    kv_cache: float  # with weights copied for decoding
    collect_activations: float  # peak of sampling and scoring; of the discriminator's update
    update_activations: float  # peak of forward and backward pass
    collect_flops: float
    update_flops: float
    encoders: float = 0.0  # the largest text or image encoder, which visits the GPU while no activations are there
    collect_bytes_read: float = 0.0  # of decoding token by token, which is bound by memory bandwidth
    collect_batch: int = 0  # samples per call of the network
    update_batch: int = 0
    rollout_copies: float = 0.0  # of large linear layers in fewer bits
    host_memory: float = 0.0  # bytes of weights, gradients, optimizer state and snapshots in host memory, for one rank
    num_checkpoints: int = 0  # of blocks that activation checkpointing can recompute

    @property
    def flops(self) -> float:
        return self.collect_flops + self.update_flops

    def seconds(self, flops_per_second: float, bytes_per_second: float) -> float:
        """Time of a step."""
        collect = max(self.collect_flops / flops_per_second, self.collect_bytes_read / bytes_per_second)
        return collect + self.update_flops / flops_per_second

    @property
    def total(self) -> float:
        """Peak memory. Gradients count while sampling too, since the allocator seldom reuses their memory."""
        static = self.weights + self.gradients + self.optimizer_state + self.snapshots + self.frozen + self.kv_cache
        static += self.rollout_copies
        return static + max(self.update_activations, self.collect_activations, self.encoders)

    @property
    def peaks_at_embedding(self) -> bool:
        """Whether memory is highest while prompts are embedded."""
        return self.encoders > max(self.update_activations, self.collect_activations)


def estimate_any(config: RunConfig | AutoencoderRunConfig, world_size: int = 1) -> ResourceEstimate:
    """Estimate a run that trains a generator or an autoencoder."""
    if isinstance(config, AutoencoderRunConfig):
        return estimate_autoencoder_resources(config, world_size)
    return estimate_resources(config, world_size)


def suggest_any_savings(
    config: RunConfig | AutoencoderRunConfig,
    estimate: ResourceEstimate,
    world_size: int,
    gpu_bytes: float,
    estimate_fn: EstimateFn | None = None,
) -> Iterator[Saving]:
    """Settings of a generator's or an autoencoder's run that save memory, the cheapest first."""
    if isinstance(config, AutoencoderRunConfig):
        return suggest_autoencoder_savings(config, world_size)
    return suggest_savings(config, estimate, world_size, gpu_bytes, estimate_fn)


def estimate_resources(config: RunConfig, world_size: int = 1) -> ResourceEstimate:
    """Estimate a run that trains a generator."""
    config = replace(config, engine=resolve_for_planning(config.engine)[0])
    with warnings.catch_warnings():  # PyTorch's, about tensors that the forward pass of Z-Image makes
        warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor that is not a leaf")
        measured = measure(config, world_size)
    weights, gradients, optimizer_state, snapshots = _parameter_bytes(config, world_size, measured)
    host_memory = 0.0
    if config.engine.cpu_offload:
        host_memory = weights + gradients + optimizer_state + snapshots
        weights, gradients = _gathered_bytes(config.engine, measured)
        optimizer_state = snapshots = 0.0
    return ResourceEstimate(
        weights=weights,
        gradients=gradients,
        optimizer_state=optimizer_state,
        snapshots=snapshots,
        frozen=measured.frozen_bytes + _reward_bytes(config),
        kv_cache=measured.kv_cache_bytes,
        collect_activations=measured.collect_bytes,
        update_activations=_offloaded(measured.update_bytes, config.engine),
        collect_flops=measured.collect_flops,
        update_flops=measured.update_flops,
        encoders=measured.encoder_bytes,
        collect_bytes_read=measured.collect_bytes_read,
        collect_batch=measured.collect_batch,
        update_batch=measured.update_batch,
        rollout_copies=measured.rollout_copy_bytes,
        host_memory=host_memory,
        num_checkpoints=measured.num_checkpoints,
    )


def _offloaded(activations: float, engine: EngineConfig) -> float:
    return activations / 2 if engine.activation_memory == "offload" else activations


def _num_shards(engine: EngineConfig, world_size: int) -> int:
    if engine.strategy == "replicated":
        return 1
    return world_size // (engine.hsdp_replicas if engine.strategy == "hsdp" else 1)


def _parameter_bytes(config: RunConfig, world_size: int, measured: Measurement) -> tuple[float, float, float, float]:
    """Bytes of weights, gradients, optimizer state and snapshots on one rank."""
    engine, trained = config.engine, measured.trainable
    size, shards = precision.DTYPES[engine.param_dtype].itemsize, _num_shards(engine, world_size)
    frozen = 0
    if config.tuning.is_adapter:
        whole = measured.parameters - trained - measured.quantized
        frozen = whole * frozen_dtype(config).itemsize + measured.quantized
    weights = frozen + (trained if config.tuning.is_adapter else measured.parameters) * size
    state = trained * OPTIMIZER_STATE_BYTES[config.optim.state_dtype]
    return weights / shards, trained * size / shards, state / shards, _snapshot_bytes(config, trained, size) / shards


def _gathered_bytes(engine: EngineConfig, measured: Measurement) -> tuple[float, float]:
    """Bytes of weights and gradients on the GPU while they are kept in host memory.

    One block computes while the next is copied; the gradients of one block wait to be reduced and copied back. What is
    outside of blocks is gathered in its own dtype from the first forward call to the end of the backward pass.
    """
    dtypes = (engine.param_dtype, engine.precision, engine.reduce_dtype)
    own, compute, reduce = (precision.DTYPES[name].itemsize for name in dtypes)
    blocks = measured.block_parameters
    block, outer = max(blocks, default=0), measured.parameters - sum(blocks)
    trained_share = measured.trainable / measured.parameters
    return 2 * block * compute + outer * own, trained_share * (block * (compute + reduce) + outer * (own + reduce))


def _snapshot_bytes(config: RunConfig, trained: int, size: int) -> float:
    names = [*config.objective.snapshots(), *(["ema"] if config.ema_decay else [])]
    on_cpu = isinstance(config.tuning, FullFinetuning) and config.tuning.snapshots_on_cpu
    if on_cpu and not config.engine.cpu_offload:
        return 0.0
    # LoRA needs no copy of the reference: without adapters the network is the reference.
    kept = [name for name in names if not (config.tuning.is_adapter and name == "reference")]
    return float(sum(trained * (size if name == "reference" else 4) for name in kept))


def _reward_bytes(config: RunConfig) -> float:
    """Memory of the rewards on the GPU, from their cards."""
    half = 0.5 if config.engine.precision in ("bf16", "fp16") else 1.0
    units = {"GB": 1e9, "MB": 1e6}
    total = 0.0
    for reward in config.rewards.values():
        memory = reward.spec.card.memory
        match = re.search(r"([\d.]+) (GB|MB)", memory)
        if match and reward.spec.runs_on == "device" and not reward.servers:
            total += float(match[1]) * units[match[2]] * (half if "half of it" in memory else 1.0)
    return total


def suggest_savings(
    config: RunConfig,
    estimate: ResourceEstimate,
    world_size: int,
    gpu_bytes: float,
    estimate_fn: EstimateFn | None = None,
) -> Iterator[Saving]:
    """Settings that save memory, the cheapest first; each is estimated when it is asked for, by `estimate_fn`."""
    engine, optim, batch = config.engine, config.optim, config.batch
    estimate_fn = estimate_fn or estimate_resources
    if engine.strategy == "replicated" and world_size > 1:
        estimate = _shard(estimate, world_size)
        yield "engine.strategy=fsdp", estimate.total
    if estimate.peaks_at_embedding and _embeds_prompts(config):
        estimate = replace(estimate, encoders=0.0)
        yield EMBED_BEFOREHAND, estimate.total
    if engine.activation_memory == "keep":
        config = replace(config, engine=replace(engine, activation_memory="checkpoint"))
        estimate = _with_activations_of(estimate, estimate_fn(config, world_size))
        yield "engine.activation_memory=checkpoint", estimate.total
    if engine.checkpointed_blocks is not None:
        config = replace(config, engine=replace(engine, checkpointed_blocks=None))
        estimate = _with_activations_of(estimate, estimate_fn(config, world_size))
        yield "engine.checkpointed_blocks=null", estimate.total
    if engine.param_dtype == "fp32" and engine.precision == "bf16" and not config.tuning.is_adapter:
        estimate = replace(estimate, weights=estimate.weights / 2, gradients=estimate.gradients / 2)
        yield "engine.param_dtype=bf16", estimate.total
    if optim.state_dtype != "int8":
        share = OPTIMIZER_STATE_BYTES["int8"] / OPTIMIZER_STATE_BYTES[optim.state_dtype]
        estimate = replace(estimate, optimizer_state=estimate.optimizer_state * share)
        yield "optim.state_dtype=int8", estimate.total
    if getattr(config.objective, "timesteps_per_call", 1) > 1:
        objective: Any = config.objective
        config = replace(config, objective=replace(objective, timesteps_per_call=1))
        estimate = _with_activations_of(estimate, estimate_fn(config, world_size))
        yield "objective.timesteps_per_call=1", estimate.total
    if (batch.micro_batch_size or batch.prompts) > 1:
        config = replace(config, batch=replace(batch, micro_batch_size=1, rollout_batch_size=1))
        estimate = _with_activations_of(estimate, estimate_fn(config, world_size))
        yield "batch.micro_batch_size=1 batch.rollout_batch_size=1", estimate.total
    if estimate.peaks_at_embedding and _embeds_prompts(config):
        estimate = replace(estimate, encoders=0.0)
        yield EMBED_BEFOREHAND, estimate.total
    if (quantized := _with_quantized_base(config)) is not None:
        config = quantized
        other = estimate_fn(config, world_size)
        estimate = _with_weights_of(_with_activations_of(estimate, other), other)
        yield "engine.base_precision=int8", estimate.total
    if isinstance(config.objective, SRPO) and config.objective.batch_branches and len(config.objective.branches) > 1:
        estimate = replace(estimate, update_activations=estimate.update_activations / 2)
        yield "objective.batch_branches=false", estimate.total
    if not config.tuning.is_adapter:
        gradients, state = LORA_SHARE * estimate.gradients, LORA_SHARE * estimate.optimizer_state
        estimate = replace(estimate, gradients=gradients, optimizer_state=state, snapshots=0.0)
        yield "'tuning={type: lora}' optim.lr=1e-4 (approximate)", estimate.total
    if (fewer := _with_fewer_frames(config)) is not None:
        estimate = _with_activations_of(estimate, estimate_fn(fewer, world_size))
        yield f"model.frames={fewer.model.frames}", estimate.total
    if world_size == 1:
        yield _sharding_that_fits(estimate, gpu_bytes)


def _with_weights_of(estimate: ResourceEstimate, other: ResourceEstimate) -> ResourceEstimate:
    return replace(estimate, weights=other.weights, rollout_copies=other.rollout_copies)


def _sharding_that_fits(estimate: ResourceEstimate, gpu_bytes: float) -> Saving:
    """The fewest GPUs among which the run fits, or the most that are considered."""
    ranks = next((n for n in RANK_COUNTS if _shard(estimate, n).total <= gpu_bytes), RANK_COUNTS[-1])
    command = f"engine.strategy=fsdp on {ranks} GPUs, with torchrun --nproc-per-node={ranks}"
    return f"{command} (approximate)", _shard(estimate, ranks).total


def _embeds_prompts(config: RunConfig) -> bool:
    """Whether text encoders embed prompts during the run, though their embeddings could be computed before it."""
    return getattr(config.model, "embeddings", "") is None


def _with_quantized_base(config: RunConfig) -> RunConfig | None:
    """The configuration with frozen weights in 8 bits, or None if it has them already or cannot."""
    engine = replace(config.engine, base_precision="int8")
    quantized = replace(config, engine=engine)
    unchanged = config.engine.base_precision == "int8"
    return None if unchanged or check_base_precision(quantized, 1) else quantized


def _shard(estimate: ResourceEstimate, ranks: int) -> ResourceEstimate:
    """The estimate with what FSDP shards over this many ranks; frozen networks and activations are not sharded."""
    return replace(
        estimate,
        weights=estimate.weights / ranks,
        gradients=estimate.gradients / ranks,
        optimizer_state=estimate.optimizer_state / ranks,
        snapshots=estimate.snapshots / ranks,
    )


def _with_activations_of(estimate: ResourceEstimate, other: ResourceEstimate) -> ResourceEstimate:
    """The estimate with the activations and the KV cache of another one."""
    return replace(
        estimate,
        kv_cache=other.kv_cache,
        collect_activations=other.collect_activations,
        update_activations=other.update_activations,
    )


def _with_fewer_frames(config: RunConfig) -> RunConfig | None:
    """The configuration with about half as many frames; None for images, and if the model refuses that number."""
    model: Any = config.model
    if "frames" not in {f.name for f in fields(model) if f.init} or model.frames < MIN_FRAMES:
        return None
    # Autoencoders of videos take one frame more than a multiple of 4, 6 or 8.
    fewer = model.frames // 2 + model.frames % 2
    try:
        return replace(config, model=replace(model, frames=fewer))
    except ValueError:
        return None


def estimate_autoencoder_resources(config: AutoencoderRunConfig, world_size: int = 1) -> ResourceEstimate:
    """Estimate a run that trains an autoencoder, with its discriminator from the first step."""
    config = replace(config, engine=resolve_for_planning(config.engine)[0])
    micro_batch = compute_step_counts(config, world_size).micro_batch_size
    image_size = _image_size(config)
    with FakeTensorMode(allow_non_fake_inputs=True), fake_modules():
        step = FakeAutoencoderStep(config, image_size)
        if config.engine.activation_memory == "checkpoint":
            activation_memory.checkpoint_activations(step.net, config.engine.checkpointed_blocks)
        trained = [p for p in step.net.parameters() if p.requires_grad]
        discriminator = [] if step.discriminator is None else [*step.discriminator.parameters()]
        frozen = [*step.net.buffers(), *([] if step.lpips is None else step.lpips.parameters())]
        for p in (*trained, *discriminator):
            p.grad = torch.empty_like(p)
        gradients = [p.grad for p in (*trained, *discriminator)]
        existing = [*step.net.parameters(), *discriminator, *frozen, *gradients]
        update = trace_peak_bytes(lambda: step.update_autoencoder(micro_batch), existing)
        adversarial = trace_peak_bytes(lambda: step.update_discriminator(micro_batch), existing)
        flops = count_flops(lambda: step.update_autoencoder(1)) + count_flops(lambda: step.update_discriminator(1))
        count, others = (sum(p.numel() for p in parameters) for parameters in (trained, discriminator))
        frozen_bytes = sum(x.numel() * x.itemsize for x in frozen)
    shards = _num_shards(config.engine, world_size)
    return ResourceEstimate(
        weights=4 * count / shards + 4 * others,
        gradients=4 * count / shards + 4 * others,
        optimizer_state=OPTIMIZER_STATE_BYTES[config.optim.state_dtype] * (count / shards + others),
        snapshots=4 * count / shards if config.ema_decay else 0.0,
        frozen=frozen_bytes,
        kv_cache=0.0,
        collect_activations=adversarial,
        update_activations=_offloaded(update, config.engine),
        collect_flops=0.0,
        update_flops=flops * config.batch_size / world_size,
        update_batch=micro_batch,
        num_checkpoints=len(activation_memory.checkpoint_units(step.net)),
    )


def suggest_autoencoder_savings(config: AutoencoderRunConfig, world_size: int) -> Iterator[Saving]:
    """Settings that save memory, the cheapest first."""
    if config.engine.precision == "fp32":
        config = replace(config, engine=replace(config.engine, precision="bf16"))
        yield "engine.precision=bf16", estimate_autoencoder_resources(config, world_size).total
    if config.engine.activation_memory == "keep":
        config = replace(config, engine=replace(config.engine, activation_memory="checkpoint"))
        yield "engine.activation_memory=checkpoint", estimate_autoencoder_resources(config, world_size).total
    if config.engine.checkpointed_blocks is not None:
        config = replace(config, engine=replace(config.engine, checkpointed_blocks=None))
        yield "engine.checkpointed_blocks=null", estimate_autoencoder_resources(config, world_size).total
    size = compute_step_counts(config, world_size).micro_batch_size
    while size > 1:
        size = -(-size // 4)
        config = replace(config, micro_batch_size=size)
        yield f"micro_batch_size={size}", estimate_autoencoder_resources(config, world_size).total


def _image_size(config: AutoencoderRunConfig) -> tuple[int, int]:
    """Height and width of the first image of the data."""
    pixels = config.data.load(config.seed).batch(0, 1, 0, 1).pixels
    return int(pixels.shape[-2]), int(pixels.shape[-1])


def _drop_weights(spec: AutoencoderSpec) -> AutoencoderSpec:
    """The spec with random weights."""
    settings: Any = spec
    has_weights = "weights" in {f.name for f in fields(settings)}
    return replace(settings, weights=None) if has_weights else spec


class FakeAutoencoderStep:
    """The networks of an autoencoder's run on fake tensors, and both of its updates."""

    def __init__(self, config: AutoencoderRunConfig, image_size: tuple[int, int]) -> None:
        self.config, self.image_size = config, image_size
        self.net: nn.Module = _drop_weights(config.autoencoder).load(Placement())
        self.discriminator: PatchGANDiscriminator | None = None
        if (settings := config.discriminator) is not None:
            self.discriminator = PatchGANDiscriminator(
                settings.width, settings.num_layers, extra_layer=settings.extra_layer
            )
        self.lpips: LPIPSDistance | None = None
        if config.loss.lpips:
            is_tiny = config.loss.vgg_weights == TINY
            self.lpips = load_lpips(TINY, "", Placement()) if is_tiny else LPIPSDistance().eval().requires_grad_(False)

    def update_autoencoder(self, batch_size: int) -> None:
        """Reconstruct, compute all losses, and back-propagate."""
        pixels = torch.empty(batch_size, 3, *self.image_size)
        run_under_autocast(self.config.engine, lambda: self._loss(pixels)).backward()

    def _loss(self, pixels: Tensor) -> Tensor:
        shape = as_autoencoder(self.net).latent_noise_shape(pixels)
        noise = () if shape is None else (torch.empty(len(pixels), *shape),)
        reconstruction, extra = self.net(pixels, *noise)
        loss = reconstruction_loss(self.config.loss, reconstruction.float(), pixels, self.lpips).rows + extra
        if self.discriminator is not None and self.config.discriminator is not None:
            self.discriminator.requires_grad_(False)
            generator_loss = GENERATOR_LOSSES[self.config.discriminator.generator_loss]
            loss = loss + generator_loss(self.discriminator(reconstruction.float()))
            self.discriminator.requires_grad_(True)
        total: Tensor = loss.sum()
        return total

    def update_discriminator(self, batch_size: int) -> None:
        """Compute the discriminator's loss on images and reconstructions, and back-propagate."""
        if self.discriminator is None or self.config.discriminator is None:
            return
        discriminator, loss = self.discriminator, DISCRIMINATOR_LOSSES[self.config.discriminator.loss]
        batches = [torch.empty(batch_size, 3, *self.image_size) for _ in range(2)]
        run_under_autocast(self.config.engine, lambda: loss(*(discriminator(x) for x in batches)).sum()).backward()
