"""Autoencoder training (VAE, VQ, LFQ), on the same engine, checkpoints and events as generators."""

from __future__ import annotations

import json
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from ..config.schema import (
    AutoencoderRunConfig,
    CheckpointConfig,
    ReconstructionLossConfig,
    SampleConfig,
    ValidationConfig,
)
from ..core.autoencoder import AutoencoderNet, as_autoencoder
from ..core.randomness import Purpose, Randomness
from ..core.registry import ConfigError
from ..core.types import Loss, to_device
from ..core.weights import FullWeights, TensorDict, ema_decay_warmup
from ..data.dataset import Dataset
from ..training import checkpoint
from ..training.engine import Engine
from ..training.events import CheckpointSaved, Event, SamplesGenerated, TrainingFinished, TrainingStarted
from ..training.loop import interruption_reason, is_due, save_after_failure, stop_on_signal
from ..training.metrics import AsyncMetrics, AverageMeter, StepMetrics
from .discriminator import AdaptiveWeight, DiscriminatorTrainer, build_adaptive_weight
from .lpips import LPIPSDistance
from .reconstruction_loss import psnr, reconstruction_loss

LATENT_STATISTICS_IMAGES = 512  # images that the statistics of latents are measured on
CODE_USAGE_IMAGES = 256  # images that the codebook usage is measured on


class WeightsWithBuffers(FullWeights):
    """All parameters train; buffers and the discriminator's state are saved in checkpoints too."""

    extra_state: Callable[[], dict[str, TensorDict]] = dict

    def snapshot_tensors(self) -> dict[str, TensorDict]:
        buffers = {key: x for key, x in self.net.state_dict().items() if key not in self.trainable()}
        return {**self.snapshots, **({"buffers": buffers} if buffers else {}), **self.extra_state()}

    def update_snapshot(self, name: str, decay: float = 0.0) -> None:
        if name in self.snapshots or (name != "buffers" and name not in self.extra_state()):
            super().update_snapshot(name, decay)


class ReconstructionMetrics(Protocol):
    """Metrics of reconstructions on held-out images."""

    def measure(self, pixels: Tensor, reconstructions: Tensor) -> dict[str, Tensor]:
        """Features and scores [N, ...] on the CPU of images [N, 3, H, W] and their reconstructions."""

    def summarize(self, measured: Mapping[str, Tensor]) -> tuple[dict[str, float], tuple[str, ...]]:
        """Metrics of all measured images, and a sentence for each metric that is missing."""


class AutoencoderState(checkpoint.ExtraState):
    """What an autoencoder's run keeps in state.json."""

    step: checkpoint.Step
    discriminator_scaler: checkpoint.LossScale | None = None


@dataclass
class AutoencoderRun:
    net: nn.Module
    data: Dataset
    engine: Engine
    directory: Path
    steps: int
    loss: ReconstructionLossConfig = ReconstructionLossConfig()
    lpips: LPIPSDistance | None = None
    discriminator: DiscriminatorTrainer | None = None
    validation_data: Dataset | None = None  # held-out images
    reconstruction_metrics: ReconstructionMetrics | None = None  # on the held-out images, after the last step
    validation: ValidationConfig = ValidationConfig()
    batch_size: int = 64
    micro_batch_size: int | None = None
    seed: int = 0
    ema_decay: float = 0.0
    checkpoint: CheckpointConfig = CheckpointConfig()
    sample: SampleConfig = SampleConfig()
    start_step: int = 0  # steps completed
    checkpoint_metadata: Mapping[str, Any] = field(default_factory=dict)  # stored in every checkpoint
    config: AutoencoderRunConfig | None = field(init=False, default=None)  # that it was built from, if any
    step_complete: bool = field(init=False, default=True)  # False during a step, when saving would mix two steps
    weights: WeightsWithBuffers = field(init=False)
    adaptive_weight: AdaptiveWeight | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self.weights = WeightsWithBuffers(self.net, ["ema"] if self.ema_decay else [])
        self.engine.prepare(self.weights)
        methods = (
            (AutoencoderNet.measure_latents, self.abilities.channels),
            (AutoencoderNet.codebook_usage, self.abilities.codebook_size),
        )
        self.engine.register_forward_methods(self.net, *(method.__name__ for method, size in methods if size))
        if self.discriminator is not None:
            self.weights.extra_state = self.discriminator.state_groups
            adaptive = self.discriminator.config.adaptive_weight and self.discriminator.config.weight
            self.adaptive_weight = build_adaptive_weight(self.net) if adaptive else None

    @property
    def abilities(self) -> AutoencoderNet:
        """The network's optional abilities; the defaults if it is a plain `nn.Module`."""
        return as_autoencoder(self.net)

    def pixels(self, step: int, size: int, rank: int = 0, world_size: int = 1) -> Tensor:
        """Images [N, 3, H, W] of a step; every frame of a video is an image."""
        pixels: Tensor = self.data.batch(step, size, rank, world_size).pixels
        return to_device(pixels, self.engine.device).flatten(0, 1)

    def use_ema_weights(self) -> Any:
        """Use the EMA weights within the block, if there are any."""
        return self.weights.use("ema") if self.ema_decay else nullcontext()

    def save(self, step: int) -> Path:
        if self.abilities.channels:
            with torch.no_grad(), self.engine.autocast(), self.use_ema_weights():
                self.abilities.measure_latents(self.pixels(0, LATENT_STATISTICS_IMAGES))  # the same on every rank
        scaler = {"discriminator_scaler": self.discriminator.scaler_state()} if self.discriminator else {}
        extra = {**self.checkpoint_metadata, "step": step, "seed": self.seed, **scaler}
        return checkpoint.save(self.directory, step, self.engine, self.weights, extra, self.checkpoint)

    def resume(self, path: Path) -> None:
        """Restore the state of a checkpoint and continue after its step."""
        extra = checkpoint.load(path, self.engine, self.weights, AutoencoderState)
        self.start_step = int(extra["step"])
        if self.discriminator:
            self.discriminator.load_scaler_state(extra.get("discriminator_scaler"))


def train(run: AutoencoderRun) -> Iterator[Event]:
    """Train until the last step and yield an event for everything that happens, as `tastemaker.training.loop.train`."""
    metrics, summary = AsyncMetrics(run.engine.asynchronous), ""
    done = saved = run.start_step
    yield TrainingStarted(
        run.start_step, run.steps, run.directory, sum(p.numel() for p in run.weights.trainable().values())
    )
    try:
        with stop_on_signal() as stop_requested:
            for step in range(run.start_step, run.steps):
                launched, done = train_step(run, step), step + 1
                validation_due = run.validation_data is not None and is_due(done, run.validation.every, run.steps)
                sample_due = is_due(done, run.sample.every, run.steps)
                checkpoint_due = is_due(done, run.checkpoint.every, run.steps)
                wait = validation_due or sample_due or checkpoint_due or done == run.steps
                for event in metrics.push(launched, wait=wait):
                    if event.step == done and validation_due and run.validation_data is not None:
                        event = replace(event, metrics={**event.metrics, **validate(run, run.validation_data)})
                    if event.step == run.steps:
                        final, summary = evaluate_reconstructions(run)
                        event = replace(event, metrics={**event.metrics, **final})
                    yield event
                stop = run.engine.comm.any(stop_requested.is_set())
                if stop:
                    yield from metrics.flush()
                if sample_due:
                    yield generate_reconstructions(run, done)
                if checkpoint_due or stop:
                    yield CheckpointSaved(done, run.save(done))
                    saved = done
                if stop and done < run.steps:
                    yield TrainingFinished(done, interruption_reason(done))
                    return
    except Exception as error:
        yield from metrics.flush()
        yield from save_after_failure(run, error, done, saved)
        raise
    yield TrainingFinished(run.steps, f"all {run.steps} steps done{summary}")


def train_step(run: AutoencoderRun, step: int) -> StepMetrics:
    """Update the autoencoder on the reconstruction loss, then the discriminator. Does not wait for the GPU."""
    started, engine, means = time.perf_counter(), run.engine, AverageMeter()
    pixels = run.pixels(step, run.batch_size, engine.comm.rank, engine.comm.world_size)
    micro_batches = torch.split(pixels, run.micro_batch_size or len(pixels))
    run.step_complete = False
    reconstructions, row = [], engine.comm.rank * len(pixels)
    with fork_named_rng(f"{run.seed}/{step}/{engine.comm.rank}", engine.device):
        for i, images in enumerate(micro_batches):
            with engine.autocast(), engine.offload_activations():
                output, loss = reconstruct(run, step, images, row)
            last = i == len(micro_batches) - 1
            engine.backward(loss.rows.sum() / (len(pixels) * engine.comm.world_size), last=last)
            means.add_loss(loss, 1, "loss")
            reconstructions.append(output.detach())
            row += len(images)
    update = engine.launch_step(step)
    if run.ema_decay:
        run.weights.update_snapshot("ema", ema_decay_warmup(run.ema_decay, step))
    updates = [("grad_norm", update)]
    discriminator_means: dict[str, Tensor] = {}
    if run.discriminator is not None and run.discriminator.is_active(step):
        discriminator_means, discriminator_update = run.discriminator.update(step, micro_batches, reconstructions)
        updates.append(("discriminator/grad_norm", discriminator_update))
    values = {**means.mean(engine.comm), **discriminator_means}
    run.step_complete = True
    return StepMetrics(step + 1, run.batch_size, values, updates, update.lr, started)


def reconstruct(run: AutoencoderRun, step: int, pixels: Tensor, first: int = 0) -> tuple[Tensor, Loss]:
    """Reconstructions and their loss: reconstruction loss, the network's own loss and the adversarial loss."""
    with (
        run.engine.cast_weights(run.net),
        run.adaptive_weight.record_inputs() if run.adaptive_weight else nullcontext(),
    ):
        output, extra = check_outputs(run.net(pixels, *draw_latent_noise(run, step, pixels, first)), pixels)
    output = output.float()
    loss = reconstruction_loss(run.loss, output, pixels, run.lpips)
    loss = Loss(loss.rows, {**loss.metrics, **run.abilities.loss_metrics(extra)})
    if run.discriminator is None or not run.discriminator.is_active(step):
        return output, Loss(loss.rows + extra, loss.metrics)
    adversarial = run.discriminator.generator_loss(output)
    weight = torch.full((), run.discriminator.config.weight, device=output.device)
    if run.adaptive_weight is not None:
        ratio = run.adaptive_weight.weight(loss.rows.mean(), adversarial.mean(), output)
        weight = weight * run.engine.comm.mean(ratio)
    metrics = {"adversarial": adversarial.detach(), "adversarial weight": weight.expand(len(adversarial))}
    return output, Loss(loss.rows + extra + weight * adversarial, {**loss.metrics, **metrics})


def check_outputs(outputs: Any, pixels: Tensor) -> tuple[Tensor, Tensor]:
    """Reconstruction and loss of a network; refuse others, such as nanoVLA-RL's encoder output instead of a loss."""
    parts = outputs if isinstance(outputs, tuple | list) else (outputs,)
    shapes = [list(part.shape) if isinstance(part, Tensor) else type(part).__name__ for part in parts]
    if len(parts) == 2 and shapes[0] == list(pixels.shape) and shapes[1] in ([], [len(pixels)]):
        reconstruction, loss = parts
        return reconstruction, loss
    raise ConfigError(
        f"autoencoder: for images {list(pixels.shape)} the network returned {' and '.join(map(str, shapes))}; "
        "expected reconstructions of the same shape as the images, and an additional loss as a scalar or "
        f"[{len(pixels)}]; return zeros if there is no additional loss [TM556]"
    )


def draw_latent_noise(run: AutoencoderRun, step: int, pixels: Tensor, first: int) -> tuple[Tensor, ...]:
    """Noise for the latents of a variational autoencoder, independent of the split over ranks and micro-batches."""
    shape = run.abilities.latent_noise_shape(pixels)
    if shape is None:
        return ()
    rows = torch.arange(first, first + len(pixels), device=pixels.device)
    return (Randomness(run.seed, step, rows).normal(Purpose.POSTERIOR_NOISE, *shape),)


@torch.no_grad()
def validate(run: AutoencoderRun, data: Dataset) -> dict[str, float]:
    """The loss on held-out images with the EMA weights, without the adversarial loss."""
    comm, means = run.engine.comm, AverageMeter()
    # The same number on each rank, because sharded weights are gathered by all ranks together.
    per_rank = max(1, min(run.validation.num_samples, len(data)) // comm.world_size)
    pixels = data.batch(0, per_rank * comm.world_size, comm.rank, comm.world_size).pixels.flatten(0, 1)
    run.net.eval()
    with run.engine.autocast(), run.use_ema_weights():
        for part in torch.split(pixels, run.micro_batch_size or max(1, run.batch_size // comm.world_size)):
            images = part.to(run.engine.device)
            output, extra = run.net(images)
            loss = reconstruction_loss(run.loss, output.float(), images, run.lpips)
            metrics = {**loss.metrics, **run.abilities.loss_metrics(extra)}
            means.add_loss(Loss(loss.rows + extra, metrics), 1, "loss")
    run.net.train()
    return {f"validation/{name}": value for name, value in means.compute(comm).items()}


@torch.no_grad()
def evaluate_reconstructions(run: AutoencoderRun) -> tuple[dict[str, float], str]:
    """Metrics of reconstructions of held-out images, which are written to reconstruction.json, and a summary."""
    if run.validation_data is None or run.reconstruction_metrics is None:
        return {}, ""
    count = min(run.validation.num_samples, len(run.validation_data))
    pixels, measured = run.validation_data.batch(0, count, 0, 1).pixels.flatten(0, 1), []
    run.net.eval()
    with run.use_ema_weights():
        for part in torch.split(pixels, run.micro_batch_size or run.batch_size):
            images = part.to(run.engine.device)
            with run.engine.autocast():
                output = run.net(images)[0].float()
            measured.append(run.reconstruction_metrics.measure(images, output))
    run.net.train()
    numbers, missing = run.reconstruction_metrics.summarize(
        {key: torch.cat([part[key] for part in measured]) for key in measured[0]}
    )
    if run.engine.comm.rank == 0:
        run.directory.mkdir(parents=True, exist_ok=True)
        report = {"images": len(pixels), **numbers, "missing": list(missing)}
        (run.directory / "reconstruction.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    words = ", ".join(f"{name} {value:.4g}" for name, value in numbers.items())
    notes = "".join(f"; {sentence}" for sentence in missing)
    summary = f"; {len(pixels)} held-out reconstructions: {words}{notes}"
    return {f"reconstruction/{name}": x for name, x in numbers.items()}, summary


@contextmanager
def fork_named_rng(name: str, device: torch.device) -> Iterator[None]:
    """Seed the global generators by a name within the block, so that a resumed run draws the same numbers."""
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(zlib.crc32(name.encode()))
        yield


@torch.no_grad()
def generate_reconstructions(run: AutoencoderRun, step: int) -> SamplesGenerated:
    """A sample event of images, each above its reconstruction."""
    batch = run.data.batch(0, run.sample.count, 0, 1)
    pixels = batch.pixels[:, 0].to(run.engine.device)
    run.net.eval()
    with run.engine.autocast(), run.use_ema_weights() if run.sample.weights == "ema" else nullcontext():
        output, _ = run.net(pixels)
        usage = run.abilities.codebook_usage(run.pixels(0, CODE_USAGE_IMAGES)) if run.abilities.codebook_size else None
    run.net.train()
    metrics = {"psnr": float(psnr(output.float(), pixels).mean())}
    if usage is not None:
        metrics["codes used"] = usage
    pairs = torch.cat([pixels, output.float().clamp(0, 1)], 2)[:, None].cpu()
    prompts: Sequence[str] = batch.prompts
    return SamplesGenerated(step, tuple(prompts), pairs, metrics)
