"""Training of autoencoders: the same engine, checkpoints and events as for generators, with pictures to copy."""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..codec import Counted, Settling
from ..config.run import CheckpointConfig, Reconstruction, SampleConfig
from ..data.spec import Dataset
from ..types import Loss
from ..weights import FullWeights, Tensors, warm
from . import checkpoint
from .engine import Engine
from .events import Event, Finished, Sampled, Saved, Started, Updated
from .loop import Means, asked_to_stop

SETTLED = 512  # pictures that latents are measured on
COUNTED = 256  # pictures that used codes are counted in


class WithBuffers(FullWeights):
    """Every parameter trains; what the network keeps beside parameters goes into checkpoints too."""

    def stored(self) -> dict[str, Tensors]:
        kept = {key: buffer for key, buffer in self.net.state_dict().items() if key not in self.trainable()}
        return {**self.snapshots, **({"buffers": kept} if kept else {})}

    def blend(self, name: str, decay: float = 0.0) -> None:
        if name != "buffers":
            super().blend(name, decay)


@dataclass
class AutoencoderRun:
    net: nn.Module
    data: Dataset
    engine: Engine
    directory: Path
    steps: int
    loss: Reconstruction = Reconstruction()
    rows: int = 64
    seed: int = 0
    ema: float = 0.0
    checkpoint: CheckpointConfig = CheckpointConfig()
    sample: SampleConfig = SampleConfig()
    start: int = 0  # steps completed
    note: Mapping[str, Any] = field(default_factory=dict)  # goes into every checkpoint
    weights: WithBuffers = field(init=False)

    def __post_init__(self) -> None:
        self.weights = WithBuffers(self.net, ["ema"] if self.ema else [])
        self.engine.prepare(self.weights)

    def pixels(self, step: int, size: int, rank: int = 0, world: int = 1) -> Tensor:
        """Pictures of a step; frames are pictures too: [N, 3, H, W]."""
        pixels: Tensor = self.data.batch(step, size, rank, world).pixels
        return pixels.to(self.engine.device).flatten(0, 1)

    def averaged(self) -> Any:
        """Within the block the network runs on the weights that will be used."""
        return self.weights.use("ema") if self.ema else nullcontext()

    def save(self, step: int) -> Path:
        if isinstance(self.net, Settling):
            with torch.no_grad(), self.engine.computing(), self.averaged():
                self.net.settle(self.pixels(0, SETTLED))  # the same on every rank
        extra = {**self.note, "step": step, "seed": self.seed}
        return checkpoint.save(self.directory, step, self.engine, self.weights, extra, self.checkpoint)

    def resume(self, path: Path) -> None:
        """Go on from a checkpoint as if nothing had happened."""
        self.start = int(checkpoint.load(path, self.engine, self.weights)["step"])


def train(run: AutoencoderRun) -> Iterator[Event]:
    """Learn until the last step, telling of each; a signal to stop saves first and ends early."""
    yield Started(run.start, run.steps, run.directory, sum(p.numel() for p in run.weights.trainable().values()))
    with asked_to_stop() as asked:
        for step in range(run.start, run.steps):
            yield learn(run, step)
            done = step + 1
            stop = run.engine.comm.any(asked.is_set())
            if run.sample.every and (done % run.sample.every == 0 or done == run.steps):
                yield look(run, done)
            if done % run.checkpoint.every == 0 or done == run.steps or stop:
                yield Saved(done, run.save(done))
            if stop and done < run.steps:
                yield Finished(done, f"asked to stop after step {done}; the same command goes on from there")
                return
    yield Finished(run.steps, f"all {run.steps} steps done")


def learn(run: AutoencoderRun, step: int) -> Updated:
    """One step: copy pictures, and pay for the difference."""
    began, engine, means = time.perf_counter(), run.engine, Means()
    pixels = run.pixels(step, run.rows, engine.comm.rank, engine.comm.world)
    with seeded(f"{run.seed}/{step}/{engine.comm.rank}", engine.device), engine.computing(), engine.keeping():
        made, extra = run.net(pixels)
        loss = priced(run.loss, made.float(), pixels, extra)
    engine.backward(loss.rows.sum() / (len(pixels) * engine.comm.world), last=True)
    means.note(loss, 1)
    update = engine.step(step)
    if run.ema:
        run.weights.blend("ema", warm(run.ema, step))
    metrics = {**means.over(engine.comm), "grad_norm": update.grad_norm, "lr": update.lr}
    return Updated(step + 1, metrics, time.perf_counter() - began, run.rows)


def edges(difference: Tensor) -> Tensor:
    """How much neighbouring pixels differ otherwise than they should: [N]."""
    across, down = difference.diff(dim=-1).abs(), difference.diff(dim=-2).abs()
    return across.flatten(1).mean(1) + down.flatten(1).mean(1)


# What a reconstruction may be compared by, of the difference from -2 to 2: [N, 3, H, W] -> [N].
TERMS: dict[str, Callable[[Tensor], Tensor]] = {
    "l1": lambda difference: difference.abs().flatten(1).mean(1),
    "mse": lambda difference: difference.square().flatten(1).mean(1),
    "edge": edges,
}


def priced(weights: Reconstruction, made: Tensor, pixels: Tensor, extra: Tensor) -> Loss:
    """The loss of each picture, and how good the copies are in decibels."""
    difference = 2 * (made - pixels)
    found = {f.name: getattr(weights, f.name) for f in fields(weights)}
    terms = {name: TERMS[name](difference) for name, weight in found.items() if weight}
    rows = sum((found[name] * term for name, term in terms.items()), torch.zeros_like(difference[:, 0, 0, 0])) + extra
    with torch.no_grad():
        error = (made.clamp(0, 1) - pixels).square().flatten(1).mean(1).clamp(min=1e-10)
        told = {**{name: term.detach() for name, term in terms.items()}, "psnr": -10 * error.log10()}
    return Loss(rows, told)


@contextmanager
def seeded(name: str, device: torch.device) -> Iterator[None]:
    """Within the block whatever is drawn is a function of the name, so that a resume draws alike."""
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(zlib.crc32(name.encode()))
        yield


@torch.no_grad()
def look(run: AutoencoderRun, step: int) -> Sampled:
    """Originals, each above its copy by the weights that will be used."""
    batch = run.data.batch(0, run.sample.count, 0, 1)
    pixels = batch.pixels[:, 0].to(run.engine.device)
    run.net.eval()
    with run.engine.computing(), run.averaged() if run.sample.use == "ema" else nullcontext():
        made, _ = run.net(pixels)
        used = {"codes used": run.net.share(run.pixels(0, COUNTED))} if isinstance(run.net, Counted) else {}
    run.net.train()
    error = (made.float().clamp(0, 1) - pixels).square().mean().clamp(min=1e-10)
    both = torch.cat([pixels, made.float().clamp(0, 1)], 2)[:, None].cpu()
    prompts: Sequence[str] = batch.prompts
    return Sampled(step, tuple(prompts), both, {"psnr": float(-10 * error.log10()), **used})
