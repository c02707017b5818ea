"""Training speed of autoencoders with LPIPS and discriminator as published, on random images.

    python bench/vae.py --out vae.json            # on a GPU: explainingai's VAE at 128 pixels, AutoencoderKL at 256
    python bench/vae.py --tiny --out tiny.json    # small networks, on any machine

A step includes reconstruction, losses, both optimizer steps and the EMA. VGG16 has random weights at the same cost. A
forward pass of AutoencoderKL is 0.9 TFLOP per image, so that a step of 16 is 43 TFLOP and takes 0.15 s at 300 TFLOP/s.
Results are written at once.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from device import CUDA, DEVICE, device_name, peak_gib, reset_memory, synchronize  # beside this file, in no package
from sections import log, log_errors, result_writer, section_deadline

from tastemaker.autoencoders.discriminator import DiscriminatorTrainer
from tastemaker.autoencoders.lpips import TINY, LPIPSDistance, load_lpips
from tastemaker.autoencoders.patchgan import PatchGANDiscriminator
from tastemaker.autoencoders.training import AutoencoderRun, train_step
from tastemaker.config.schema import DiscriminatorConfig, EngineConfig, OptimConfig, ReconstructionLossConfig
from tastemaker.core.autoencoder import AutoencoderSpec
from tastemaker.core.types import ImageBatch, Placement, PromptBatch
from tastemaker.data.dataset import Dataset
from tastemaker.models.autoencoder_kl import AutoencoderKLSpec
from tastemaker.models.block_vae import BlockVaeSpec
from tastemaker.training.engine import Engine


@dataclass(frozen=True)
class RandomImages(Dataset):
    """Random images, the same at every step."""

    pixels: torch.Tensor  # [N, 1, 3, H, W]

    def __len__(self) -> int:
        return len(self.pixels)

    def batch(self, step: int, size: int, rank: int, world_size: int) -> ImageBatch:
        return ImageBatch(("",) * size, self.pixels[:size])

    def first_prompts(self, count: int) -> PromptBatch:
        return PromptBatch(("",) * count, ({},) * count)


@dataclass(frozen=True)
class VaeCase:
    name: str
    spec: AutoencoderSpec
    image_size: int
    batch_size: int
    discriminator: bool = True


def build_run(case: VaeCase, steps: int, *, tiny: bool, compiled: bool) -> AutoencoderRun:
    engine_config = EngineConfig(device="auto", precision="bf16" if CUDA else "fp32", compile=compiled)
    spec, optim = case.spec.tiny() if tiny else case.spec, OptimConfig(max_grad_norm=0.0)
    engine = Engine(engine_config, optim, steps, 0)
    config = DiscriminatorConfig(
        start_step=0, loss="least_squares", generator_loss="least_squares", width=8 if tiny else 64, extra_layer=False
    )
    with DEVICE:  # create the weights there
        net = spec.load(engine.placement())
        discriminator = PatchGANDiscriminator(config.width, config.num_layers, extra_layer=config.extra_layer)
        lpips = load_lpips(TINY, "", Placement(DEVICE)) if tiny else LPIPSDistance().eval().requires_grad_(False)
    trainer = DiscriminatorTrainer(discriminator, config, engine_config, steps, optim)
    return AutoencoderRun(
        net=net,
        data=RandomImages(torch.rand(case.batch_size, 1, 3, case.image_size, case.image_size, device=DEVICE)),
        engine=engine,
        directory=Path("unused"),
        steps=steps,
        loss=ReconstructionLossConfig(l1=0.0, mse=1.0, gradient=0.0, lpips=1.0),
        lpips=lpips,
        discriminator=trainer if case.discriminator else None,
        batch_size=case.batch_size,
        ema_decay=0.999,
    )


def measure(case: VaeCase, steps: int, *, tiny: bool, compiled: bool) -> dict[str, Any]:
    """Return the median time of the second half of the steps. The first half warms up."""
    reset_memory()
    run, times = build_run(case, steps, tiny=tiny, compiled=compiled), list[float]()
    for step in range(steps):
        start = time.perf_counter()
        train_step(run, step)
        synchronize()
        times.append(time.perf_counter() - start)
        if not step:
            log(case.name, f"first step of {times[0]:.1f} s")
    median = sorted(times[steps // 2 :])[(steps - steps // 2) // 2]
    return {
        "case": case.name,
        "compiled": compiled,
        "weights": sum(p.numel() for p in run.net.parameters()),
        "batch_size": case.batch_size,
        "image_size": case.image_size,
        "seconds": median,
        "images_per_second": case.batch_size / median,
        "peak_gib": peak_gib(),
    }


def build_cases(tiny: bool) -> list[VaeCase]:
    """Return the cases, the most important first."""
    few, many, small, large = (2, 2, 32, 32) if tiny else (16, 32, 128, 256)
    return [
        VaeCase("block_vae, as published", BlockVaeSpec(mid_channels=(384,)), small, many),
        VaeCase("autoencoder_kl", AutoencoderKLSpec(), large, few),
        VaeCase("block_vae, with attention", BlockVaeSpec(), small, many),
        VaeCase("block_vae, without discriminator", BlockVaeSpec(), small, many, discriminator=False),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", default="vae.json")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=35.0, help="no case starts after this time")
    options = parser.parse_args()
    steps, record = 4 if options.tiny else options.steps, result_writer(options.out)
    for case in build_cases(options.tiny):
        if time.monotonic() > section_deadline(options):
            log(case.name, "skipped: no time is left")
            continue
        with log_errors(case.name, "the case"):
            result = measure(case, steps, tiny=options.tiny, compiled=options.compile)
            rate, memory = f"{result['images_per_second']:.1f} images/s", f"{result['peak_gib']:.1f} GiB"
            log(case.name, f"{rate}, {result['seconds']:.3f} s per step, {memory} on {device_name()}")
            record({**result, "device": device_name(), "torch": torch.__version__})


if __name__ == "__main__":
    main()
