"""How many pictures a second an autoencoder learns from, with LPIPS and the critic as published, on random pictures.

    python bench/vae.py --out vae.json            # on a GPU: explainingai's VAE at 128 pixels, AutoencoderKL at 256
    python bench/vae.py --tiny --out tiny.json    # the same lines at small size, on any machine

A step is all of it: the copy, its losses, both updates and the average. VGG16 is of random weights, at the same cost.
AutoencoderKL's forward pass is 0.9 TFLOP a picture, so that a step of 16 is 43 and takes 0.15 s at 300 TFLOP/s. Each
number is told and written once it is known.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from device import CUDA, DEVICE, forget, gib, settle  # beside this file, in no package
from sections import deadline, keeper, say, spared

from tastemaker.autoencoders.discriminator import DiscriminatorTrainer
from tastemaker.autoencoders.lpips import TINY, LPIPSDistance, load_lpips
from tastemaker.autoencoders.patchgan import PatchGANDiscriminator
from tastemaker.autoencoders.training import AutoencoderRun, train_step
from tastemaker.config.schema import DiscriminatorConfig, EngineConfig, OptimConfig, ReconstructionLossConfig
from tastemaker.core.autoencoder import AutoencoderSpec
from tastemaker.core.types import ImageBatch, Placement, PromptBatch
from tastemaker.models.autoencoder_kl import AutoencoderKL
from tastemaker.models.block_vae import BlockVae
from tastemaker.training.engine import Engine


@dataclass(frozen=True)
class Noise:
    """Random pictures, the same every step."""

    pixels: torch.Tensor  # [N, 1, 3, H, W]

    def __len__(self) -> int:
        return len(self.pixels)

    def batch(self, step: int, size: int, rank: int, world: int) -> ImageBatch:
        return ImageBatch(("",) * size, self.pixels[:size])

    def first(self, count: int) -> PromptBatch:
        return PromptBatch(("",) * count, ({},) * count)


@dataclass(frozen=True)
class Case:
    name: str
    spec: AutoencoderSpec
    size: int
    rows: int
    critic: bool = True


def run(case: Case, steps: int, *, tiny: bool, compiled: bool) -> AutoencoderRun:
    settings = EngineConfig(device="auto", precision="bf16" if CUDA else "fp32", compile=compiled)
    spec, optim = case.spec.tiny() if tiny else case.spec, OptimConfig(clip=0.0)
    engine = Engine(settings, optim, steps, 0)
    told = DiscriminatorConfig(
        start=0, loss="least_squares", deceive="least_squares", width=8 if tiny else 64, tail=False
    )
    with torch.device(DEVICE):  # where weights are made
        net, critic = spec.load(engine.placement()), PatchGANDiscriminator(told.width, told.layers, tail=told.tail)
        lpips = load_lpips(TINY, "", Placement(DEVICE)) if tiny else LPIPSDistance().eval().requires_grad_(False)
    return AutoencoderRun(
        net=net,
        data=Noise(torch.rand(case.rows, 1, 3, case.size, case.size, device=DEVICE)),
        engine=engine,
        directory=Path("unused"),
        steps=steps,
        loss=ReconstructionLossConfig(l1=0.0, mse=1.0, edge=0.0, lpips=1.0),
        lpips=lpips,
        critic=DiscriminatorTrainer(critic, told, settings, steps, optim) if case.critic else None,
        rows=case.rows,
        ema=0.999,
    )


def measured(case: Case, steps: int, *, tiny: bool, compiled: bool) -> dict[str, Any]:
    """Seconds of a step, the middle one of the second half of them; the first half warms up."""
    forget()
    made, took = run(case, steps, tiny=tiny, compiled=compiled), list[float]()
    for step in range(steps):
        began = time.perf_counter()
        train_step(made, step)
        settle()
        took.append(time.perf_counter() - began)
        if not step:
            say(case.name, f"first step of {took[0]:.1f} s")
    middle = sorted(took[steps // 2 :])[(steps - steps // 2) // 2]
    weights = sum(p.numel() for p in made.net.parameters())
    told = {"case": case.name, "compiled": compiled, "weights": weights, "rows": case.rows, "size": case.size}
    return {**told, "seconds": middle, "pictures_per_second": case.rows / middle, "peak_gib": gib()}


def cases(tiny: bool) -> list[Case]:
    """What is asked for most comes first."""
    few, many, small, large = (2, 2, 32, 32) if tiny else (16, 32, 128, 256)
    return [
        Case("block_vae, as published", BlockVae(mid_channels=(384,)), small, many),
        Case("autoencoder_kl", AutoencoderKL(), large, few),
        Case("block_vae, attending", BlockVae(), small, many),
        Case("block_vae, without critic", BlockVae(), small, many, critic=False),
    ]


def main() -> None:
    asked = argparse.ArgumentParser(description=__doc__)
    asked.add_argument("--out", default="vae.json")
    asked.add_argument("--tiny", action="store_true")
    asked.add_argument("--compile", action="store_true")
    asked.add_argument("--steps", type=int, default=10)
    asked.add_argument("--seconds", type=float, default=35.0, help="after which nothing new is begun")
    options = asked.parse_args()
    steps, keep = 4 if options.tiny else options.steps, keeper(options.out)
    device = torch.cuda.get_device_name() if CUDA else "cpu"
    for case in cases(options.tiny):
        if time.monotonic() > deadline(options):
            say(case.name, "left out: no time")
            continue
        with spared(case.name, "it"):
            row = measured(case, steps, tiny=options.tiny, compiled=options.compile)
            rate, memory = f"{row['pictures_per_second']:.1f} pictures/s", f"{row['peak_gib']:.1f} GiB"
            say(case.name, f"{rate}, {row['seconds']:.3f} s a step, {memory} on {device}")
            keep({**row, "device": device, "torch": torch.__version__})


if __name__ == "__main__":
    main()
