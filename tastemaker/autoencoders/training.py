"""Autoencoder training (VAE, VQ, LFQ), on the same engine, checkpoints and events as generators."""

from __future__ import annotations

import json
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from ..config.schema import CheckpointConfig, ReconstructionLossConfig, SampleConfig, ValidationConfig
from ..core.autoencoder import SupportsCodebookUsage, SupportsLatentNoise, SupportsLatentStatistics
from ..core.randomness import Randomness
from ..core.registry import ConfigError
from ..core.types import Loss, to_device
from ..core.weights import FullWeights, TensorDict, ema_decay_warmup
from ..data.spec import Dataset
from ..training import checkpoint
from ..training.async_metrics import AsyncMetrics, PendingMetrics, is_due
from ..training.engine import Engine
from ..training.events import CheckpointSaved, Event, SamplesGenerated, StepCompleted, TrainingFinished, TrainingStarted
from ..training.failure_checkpoint import save_on_failure
from ..training.loop import AverageMeter, stop_on_signal
from .discriminator import AdaptiveWeight, DiscriminatorTrainer, build_adaptive_weight
from .lpips import LPIPSDistance
from .reconstruction_loss import psnr, reconstruction_loss

LATENT_STATISTICS_IMAGES = 512  # pictures that latents are measured on
CODE_USAGE_IMAGES = 256  # pictures that used codes are counted in


class WeightsWithBuffers(FullWeights):
    """Every parameter trains; what the network keeps beside parameters goes into checkpoints too."""

    others: Callable[[], dict[str, TensorDict]] = dict  # what else does

    def stored(self) -> dict[str, TensorDict]:
        kept = {key: buffer for key, buffer in self.net.state_dict().items() if key not in self.trainable()}
        return {**self.snapshots, **({"buffers": kept} if kept else {}), **self.others()}

    def blend(self, name: str, decay: float = 0.0) -> None:
        if name in self.snapshots or (name != "buffers" and name not in self.others()):
            super().blend(name, decay)


class ReconstructionMetrics(Protocol):
    """How good copies are, by what there is to tell it."""

    def look(self, pixels: Tensor, made: Tensor) -> dict[str, Tensor]:
        """What is seen of some pictures [N, 3, H, W] and their copies: [N, ...] each, on the host."""

    def numbers(self, seen: Mapping[str, Tensor]) -> tuple[dict[str, float], tuple[str, ...]]:
        """What that amounts to, and sentences about what it does not."""


@dataclass
class AutoencoderRun:
    net: nn.Module
    data: Dataset
    engine: Engine
    directory: Path
    steps: int
    loss: ReconstructionLossConfig = ReconstructionLossConfig()
    lpips: LPIPSDistance | None = None
    critic: DiscriminatorTrainer | None = None
    held: Dataset | None = None  # pictures that nothing is learned from
    measure: ReconstructionMetrics | None = None  # of copies of those, when all steps are done
    validation: ValidationConfig = ValidationConfig()
    rows: int = 64
    microbatch: int | None = None
    seed: int = 0
    ema: float = 0.0
    checkpoint: CheckpointConfig = CheckpointConfig()
    sample: SampleConfig = SampleConfig()
    start: int = 0  # steps completed
    note: Mapping[str, Any] = field(default_factory=dict)  # goes into every checkpoint
    whole: bool = field(init=False, default=True)  # no part of a step is done without the rest
    weights: WeightsWithBuffers = field(init=False)
    balance: AdaptiveWeight | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self.weights = WeightsWithBuffers(self.net, ["ema"] if self.ema else [])
        self.engine.prepare(self.weights)
        entered = ((SupportsLatentStatistics, "settle"), (SupportsCodebookUsage, "share"))
        self.engine.enter(self.net, *(name for kind, name in entered if isinstance(self.net, kind)))
        if self.critic is not None:
            self.weights.others = self.critic.stored
            counts = self.critic.config.adaptive and self.critic.config.weight
            self.balance = build_adaptive_weight(self.net) if counts else None

    def pixels(self, step: int, size: int, rank: int = 0, world: int = 1) -> Tensor:
        """Pictures of a step; frames are pictures too: [N, 3, H, W]."""
        pixels: Tensor = self.data.batch(step, size, rank, world).pixels
        return to_device(pixels, self.engine.device).flatten(0, 1)

    def averaged(self) -> Any:
        """Within the block the network runs on the weights that will be used."""
        return self.weights.use("ema") if self.ema else nullcontext()

    def save(self, step: int) -> Path:
        if isinstance(self.net, SupportsLatentStatistics):
            with torch.no_grad(), self.engine.computing(), self.averaged():
                self.net.settle(self.pixels(0, LATENT_STATISTICS_IMAGES))  # the same on every rank
        scaler = {"critic_scaler": self.critic.scaler()} if self.critic else {}
        extra = {**self.note, "step": step, "seed": self.seed, **scaler}
        return checkpoint.save(self.directory, step, self.engine, self.weights, extra, self.checkpoint)

    def resume(self, path: Path) -> None:
        """Go on from a checkpoint as if nothing had happened."""
        extra = checkpoint.load(path, self.engine, self.weights)
        self.start = int(extra["step"])
        if self.critic:
            self.critic.restore(extra.get("critic_scaler"))


def train(run: AutoencoderRun) -> Iterator[Event]:
    """Learn until the last step, telling of each; a signal to stop saves first and ends early."""
    return save_on_failure(run, train_loop(run))


def train_loop(run: AutoencoderRun) -> Iterator[Event]:
    """Run the training loop without saving a checkpoint when an exception is raised."""
    yield TrainingStarted(run.start, run.steps, run.directory, sum(p.numel() for p in run.weights.trainable().values()))
    told, lead = "", AsyncMetrics(run.engine.leads)
    with stop_on_signal() as asked:
        for step in range(run.start, run.steps):
            done = step + 1
            every = (run.validation.every if run.held is not None else 0, run.sample.every, run.checkpoint.every)
            validated, looked, saved = (is_due(done, often, run.steps) for often in every)
            now = validated or looked or saved or done == run.steps
            for update in lead.told(partial(launch_train_step, run, step), now=now):
                if update.step == done and validated and run.held is not None:
                    update = replace(update, metrics={**update.metrics, **validate(run, run.held)})
                if update.step == run.steps:
                    found, told = evaluate_reconstructions(run)
                    update = replace(update, metrics={**update.metrics, **found})
                yield update
            stop = run.engine.comm.any(asked.is_set())
            if stop:
                yield from lead.rest()
            if looked:
                yield generate_reconstructions(run, done)
            if saved or stop:
                yield CheckpointSaved(done, run.save(done))
            if stop and done < run.steps:
                yield TrainingFinished(done, f"asked to stop after step {done}; the same command goes on from there")
                return
    yield TrainingFinished(run.steps, f"all {run.steps} steps done{told}")


def train_step(run: AutoencoderRun, step: int) -> StepCompleted:
    """Run one training step: update the autoencoder on the reconstruction loss, then the discriminator."""
    return launch_train_step(run, step)()


def launch_train_step(run: AutoencoderRun, step: int) -> PendingMetrics:
    """Launch a training step without waiting for the GPU. Call the returned function to get its metrics."""
    began, engine, means = time.perf_counter(), run.engine, AverageMeter()
    pixels = run.pixels(step, run.rows, engine.comm.rank, engine.comm.world)
    pieces = torch.split(pixels, run.microbatch or len(pixels))
    run.whole = False
    copies, row = [], engine.comm.rank * len(pixels)
    with fork_named_rng(f"{run.seed}/{step}/{engine.comm.rank}", engine.device):
        for i, piece in enumerate(pieces):
            with engine.computing(), engine.keeping():
                made, loss = reconstruct(run, step, piece, row)
            engine.backward(loss.rows.sum() / (len(pixels) * engine.comm.world), last=i == len(pieces) - 1)
            means.note(loss, 1)
            copies.append(made.detach())
            row += len(piece)
    launched = engine.launch(step)
    if run.ema:
        run.weights.blend("ema", ema_decay_warmup(run.ema, step))
    plays = run.critic is not None and run.critic.plays(step)
    told = run.critic.launch(step, pieces, copies) if run.critic and plays else dict
    found = means.fetched(engine.comm)
    run.whole = True

    def telling() -> StepCompleted:
        update = launched()
        metrics = {**found(), **told(), "grad_norm": update.grad_norm, "lr": update.lr}
        return StepCompleted(step + 1, metrics, time.perf_counter() - began, run.rows)

    return telling


def reconstruct(run: AutoencoderRun, step: int, pixels: Tensor, first: int = 0) -> tuple[Tensor, Loss]:
    """Return reconstructions and their loss: reconstruction, the network's own term and the adversarial term."""
    with run.engine.lowering(run.net), run.balance.watching() if run.balance else nullcontext():
        made, extra = check_outputs(run.net(pixels, *draw_latent_noise(run, step, pixels, first)), pixels)
    made = made.float()
    loss = reconstruction_loss(run.loss, made, pixels, run.lpips)
    if run.critic is None or not run.critic.plays(step):
        return made, Loss(loss.rows + extra, loss.metrics)
    price = run.critic.price(made)
    weight = torch.full((), run.critic.config.weight, device=made.device)
    if run.balance is not None:
        weight = weight * run.engine.comm.mean(run.balance.weight(loss.rows.mean(), price.mean(), made))
    told = {"adversarial": price.detach(), "adversarial weight": weight.expand(len(price))}
    return made, Loss(loss.rows + extra + weight * price, {**loss.metrics, **told})


def check_outputs(given: Any, pixels: Tensor) -> tuple[Tensor, Tensor]:
    """Refuse what a network of one's own may give back: nanoVLA-RL's give what the encoder said, in place of a loss."""
    parts = given if isinstance(given, tuple | list) else (given,)
    shapes = [list(part.shape) if isinstance(part, Tensor) else type(part).__name__ for part in parts]
    if len(parts) == 2 and shapes[0] == list(pixels.shape) and shapes[1] in ([], [len(pixels)]):
        made, extra = parts
        return made, extra
    raise ConfigError(
        f"autoencoder: of pictures {list(pixels.shape)} the network gives back {' and '.join(map(str, shapes))}; "
        f"expected copies of that shape, and a further loss, one number or [{len(pixels)}], of noughts if there is none"
    )


def draw_latent_noise(run: AutoencoderRun, step: int, pixels: Tensor, first: int) -> tuple[Tensor, ...]:
    """What a network that blurs its latents draws: of each row its own, whichever rank or piece has it."""
    if not isinstance(run.net, SupportsLatentNoise):
        return ()
    rows = torch.arange(first, first + len(pixels), device=pixels.device)
    return (Randomness(run.seed, step, rows).normal("latents", *run.net.chances(pixels)),)


@torch.no_grad()
def validate(run: AutoencoderRun, held: Dataset) -> dict[str, float]:
    """The loss, without the critic's, of held-out pictures by the weights that will be used."""
    comm, means = run.engine.comm, AverageMeter()
    # As many to each rank, or one with a piece more would wait for sharded weights that no other gathers.
    share = max(1, min(run.validation.rows, len(held)) // comm.world)
    pixels = held.batch(0, share * comm.world, comm.rank, comm.world).pixels.flatten(0, 1)
    run.net.eval()
    with run.engine.computing(), run.averaged():
        for piece in torch.split(pixels, run.microbatch or max(1, run.rows // comm.world)):
            here = piece.to(run.engine.device)
            made, extra = run.net(here)
            loss = reconstruction_loss(run.loss, made.float(), here, run.lpips)
            means.note(Loss(loss.rows + extra, loss.metrics), 1)
    run.net.train()
    return {f"validation/{name}": value for name, value in means.over(comm).items()}


@torch.no_grad()
def evaluate_reconstructions(run: AutoencoderRun) -> tuple[dict[str, float], str]:
    """How good copies of held-out pictures are in the end, as numbers and in words; in copies.json, what is missing."""
    if run.held is None or run.measure is None:
        return {}, ""
    pixels, seen = run.held.batch(0, min(run.validation.rows, len(run.held)), 0, 1).pixels.flatten(0, 1), []
    run.net.eval()
    with run.averaged():
        for piece in torch.split(pixels, run.microbatch or run.rows):
            here = piece.to(run.engine.device)
            with run.engine.computing():
                made = run.net(here)[0].float()
            seen.append(run.measure.look(here, made))
    run.net.train()
    numbers, missing = run.measure.numbers({key: torch.cat([part[key] for part in seen]) for key in seen[0]})
    if run.engine.comm.rank == 0:
        run.directory.mkdir(parents=True, exist_ok=True)
        told = {"pictures": len(pixels), **numbers, "missing": list(missing)}
        (run.directory / "copies.json").write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")
    words = ", ".join(f"{name} {value:.4g}" for name, value in numbers.items())
    said = "".join(f"; {sentence}" for sentence in missing)
    return {f"copies/{name}": x for name, x in numbers.items()}, f"; {len(pixels)} held-out copies: {words}{said}"


@contextmanager
def fork_named_rng(name: str, device: torch.device) -> Iterator[None]:
    """Within the block whatever is drawn is a function of the name, so that a resume draws alike."""
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(zlib.crc32(name.encode()))
        yield


@torch.no_grad()
def generate_reconstructions(run: AutoencoderRun, step: int) -> SamplesGenerated:
    """Originals, each above its copy by the weights that will be used."""
    batch = run.data.batch(0, run.sample.count, 0, 1)
    pixels = batch.pixels[:, 0].to(run.engine.device)
    run.net.eval()
    with run.engine.computing(), run.averaged() if run.sample.use == "ema" else nullcontext():
        made, _ = run.net(pixels)
        used = (
            {"codes used": run.net.share(run.pixels(0, CODE_USAGE_IMAGES))}
            if isinstance(run.net, SupportsCodebookUsage)
            else {}
        )
    run.net.train()
    both = torch.cat([pixels, made.float().clamp(0, 1)], 2)[:, None].cpu()
    prompts: Sequence[str] = batch.prompts
    return SamplesGenerated(step, tuple(prompts), both, {"psnr": float(psnr(made.float(), pixels).mean()), **used})
