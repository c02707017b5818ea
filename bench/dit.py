"""Training speed of DiT-XL/2 at 256x256 relative to the speed of matrix products, and of VAEs.

    python bench/dit.py --out dit.json            # on one GPU
    python bench/dit.py --tiny --out tiny.json    # small networks, on any machine

A forward pass of DiT-XL/2 is 237 GFLOP per image (256 tokens), a training step three times that, 711 GFLOP, so that 64
images take 45.5 TFLOP, or 58 ms at the 790 TFLOP/s that large bfloat16 products reach on an H200. FLOPs are counted.
Each section is a process with a time limit, and results are written at once.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from device import CUDA, DEVICE, peak_gib, print_header, synchronize  # beside this file, in no package
from sections import Record, Results, log, result_writer, run_sections, section_deadline, section_parser
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from tastemaker.autoencoders import training
from tastemaker.config.build import build, build_autoencoder
from tastemaker.config.load import load, load_any_config
from tastemaker.core.types import ImageBatch, LatentBatch, PromptBatch
from tastemaker.data.dataset import Dataset
from tastemaker.models.latent_dit.model import LatentDitSpec
from tastemaker.models.nets.latent_dit import LatentDiT
from tastemaker.training.loop import train_step
from tastemaker.training.metrics import StepMetrics, copy_to_host_async

SECTIONS = {"latents": 65, "vae-diffusers": 25, "vae": 25, "pixels": 65, "matmul": 20}  # seconds
DEFAULT_SECTIONS = "latents,vae-diffusers,vae,pixels"  # `latents` measures matrix products too
SMALL_VAE = {"block_out_channels": (8, 8, 8, 8), "norm_num_groups": 4, "layers_per_block": 1, "latent_channels": 4}
LARGE_VAE = {"block_out_channels": (128, 256, 512, 512), "layers_per_block": 2, "latent_channels": 4}


@dataclass(frozen=True)
class DitOptions:
    tiny: bool
    compile: bool
    batch_size: int
    folder: Path
    deadline: float  # by time.monotonic()

    @property
    def image_size(self) -> int:
        return 32 if self.tiny else 256


@dataclass(frozen=True)
class ConstantData(Dataset):
    """Returns the same batch at every step."""

    constant: Any

    def __len__(self) -> int:
        return len(self.constant)

    def batch(self, step: int, size: int, rank: int, world_size: int) -> Any:
        return self.constant

    def first_prompts(self, count: int) -> PromptBatch:
        return PromptBatch(("0",) * count, ({},) * count)


def median_step_seconds(
    launch: Callable[[int], Callable[[], Any]], options: DitOptions, section: str, max_steps: int
) -> float:
    """Median time per step after three warm-up steps. As in training, a step is launched before the last is awaited."""
    start = time.perf_counter()
    for number in range(3):
        launch(number)()
        synchronize()
        log(section, f"step {number + 1} after {time.perf_counter() - start:.1f} s")
    times: list[float] = []
    start, pending = time.perf_counter(), launch(3)
    while len(times) < max_steps and (not times or time.monotonic() + 2 * times[0] < options.deadline):
        upcoming = launch(4 + len(times))
        pending()
        pending, now = upcoming, time.perf_counter()
        times.append(now - start)
        start = now
    synchronize()
    times = times[1:] or times  # the first step was launched without another in flight
    return sorted(times)[len(times) // 2]


def await_later(metrics: StepMetrics) -> Callable[[], Any]:
    """Start copying the metrics of a step to the host. Call the returned function to wait for them."""
    copy = copy_to_host_async(metrics.pack())
    return lambda: metrics.to_event(copy())


def measure_matmul(options: DitOptions, section: str, record: Record) -> float:
    """Return the TFLOP/s of large bfloat16 matrix products."""
    side = 256 if options.tiny else 8192
    a, b = (torch.randn(side, side, device=DEVICE, dtype=torch.bfloat16) for _ in range(2))
    for _ in range(3):
        a @ b
    best = 0.0
    for _ in range(3):
        synchronize()
        start = time.perf_counter()
        for _ in range(20):
            a @ b
        synchronize()
        best = max(best, 20 * 2 * side**3 / (time.perf_counter() - start) / 1e12)
    log(section, f"{side}x{side} products in bfloat16: {best:.4g} TFLOP/s")
    record({"section": section, "limit": best})
    return best


def save_random_vae(options: DitOptions, *, full_size: bool) -> Path:
    """Save a random autoencoder in diffusers' layout, of Stable Diffusion's size or small."""
    import diffusers

    sizes = LARGE_VAE if full_size and not options.tiny else SMALL_VAE
    blocks = {"down_block_types": ("DownEncoderBlock2D",) * 4, "up_block_types": ("UpDecoderBlock2D",) * 4}
    vae_class: Any = diffusers.AutoencoderKL
    with DEVICE:
        net = vae_class(**blocks, **sizes)
    net.save_pretrained(options.folder / "vae")
    return options.folder / "vae"


def dit_spec(options: DitOptions, vae: Path) -> LatentDitSpec:
    spec = LatentDitSpec(
        variant="XL",
        conditioning="class",
        autoencoder=str(vae),
        image_size=options.image_size,
        patch_size=2,
        latent_channels=4,
        downsample_factor=8,
        learn_sigma=True,
    )
    return replace(spec, width=32, depth=2, heads=2) if options.tiny else spec


def count_forward_flops(spec: LatentDitSpec) -> float:
    """Count the FLOPs of a forward pass of one image on the meta device."""
    with torch.device("meta"):
        net = LatentDiT(spec.network_config())
        x, t, label = torch.randn(1, *spec.shape[1:]), torch.zeros(1), torch.zeros(1, dtype=torch.long)
    counter: Any = FlopCounterMode(display=False)
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), counter:
        net(x, t, label)
    return float(counter.get_total_flops())


def measure_dit(options: DitOptions, section: str, record: Record) -> None:
    """Time a training step of `tastemaker train`: noise, forward, backward, AdamW and EMA."""
    limit = measure_matmul(options, section, record) if section == "latents" else None
    spec, batch_size = dit_spec(options, save_random_vae(options, full_size=section == "pixels")), options.batch_size
    engine = f"engine={{precision: {'bf16' if CUDA else 'fp32'}, compile: {str(options.compile).lower()}}}"
    overrides = [engine, "optim.lr=1e-4", f"batch.prompts={batch_size}", "sample.every=0"]
    run = build(replace(load("dit-folder", overrides), model=spec), options.folder / "run")
    model: Any = run.policy.model
    prompts = tuple(str(i % 1000) for i in range(batch_size))
    if section == "latents":
        x = torch.randn(batch_size, *model.shape[1:])
        batch: Any = LatentBatch(prompts, x.pin_memory() if CUDA else x, model.fingerprint, 1.0)
    else:
        batch = ImageBatch(prompts, torch.rand(batch_size, *model.pixels, device=run.engine.device))
    run.data = ConstantData(batch)
    flops, millions = count_forward_flops(spec), sum(p.numel() for p in model.net.parameters()) / 1e6
    log(section, f"{millions:.1f} M weights, {flops / 1e9:.1f} GFLOP forward")
    max_steps = 3 if options.tiny else 15
    seconds = median_step_seconds(lambda step: await_later(train_step(run, step)), options, section, max_steps)
    rate = batch_size / seconds
    tflops = 3 * flops * rate / 1e12
    share = f", {tflops / limit:.0%} of matrix products" if limit else ""
    text = f"{rate:.1f} images/s, {tflops:.4g} TFLOP/s{share}"
    log(section, f"{seconds * 1e3:.1f} ms per step of {batch_size}: {text}; {peak_gib():.1f} GiB")
    numbers = {"images/s": rate, "ms": seconds * 1e3, "TFLOP/s": tflops, "GiB": peak_gib(), "batch": batch_size}
    record({"section": section, "GFLOP": flops / 1e9, **numbers})


def measure_vae(options: DitOptions, section: str, record: Record) -> None:
    """Time a step of an autoencoder's recipe with discriminator, but without LPIPS, whose weights would be needed."""
    recipe = "vae-celebhq" if section == "vae" else "vae-diffusers"
    batch_size = 2 if options.tiny else 16
    overrides = [
        f"engine.precision={'bf16' if CUDA else 'fp32'}",
        "loss.lpips=0",
        "discriminator.start_step=0",
        f"batch_size={batch_size}",
        "validation.every=0",
        "sample.every=0",
    ]
    config: Any = load_any_config(recipe, overrides)
    if options.tiny:
        small = replace(config.discriminator, width=8)
        config = replace(config, autoencoder=config.autoencoder.tiny(), discriminator=small)
    run = build_autoencoder(config, options.folder / "run")
    pixels = torch.rand(batch_size, 1, 3, options.image_size, options.image_size, device=run.engine.device)
    run.data = ConstantData(ImageBatch(("",) * batch_size, pixels))
    max_steps = 3 if options.tiny else 7
    seconds = median_step_seconds(lambda step: await_later(training.train_step(run, step)), options, section, max_steps)
    millions, rate = sum(p.numel() for p in run.net.parameters()) / 1e6, batch_size / seconds
    log(section, f"{millions:.1f} M weights: {seconds * 1e3:.1f} ms per step of {batch_size}, {rate:.1f} images/s")
    record({"section": section, "images/s": rate, "ms": seconds * 1e3, "GiB": peak_gib(), "batch": batch_size})


def print_table(results: Results) -> None:
    limit = next((result["limit"] for result in results if "limit" in result), None)
    print_header()
    print("| section | batch | ms per step | images/s | TFLOP/s | of matrix products | peak GiB |")
    print("|---|---|---|---|---|---|---|")
    for result in results:
        if "images/s" not in result:
            continue
        tflops = result.get("TFLOP/s")
        share = f"{tflops / limit:.0%}" if tflops and limit else ""
        cells = [result["section"], str(result["batch"]), f"{result['ms']:.1f}", f"{result['images/s']:.1f}"]
        cells += [f"{tflops:.4g}" if tflops else "", share, f"{result['GiB']:.1f}"]
        print(f"| {' | '.join(cells)} |")


def main() -> None:
    parser = section_parser(DEFAULT_SECTIONS, 112.0)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--eager", action="store_true", help="compile nothing")
    chosen = parser.parse_args()
    batch_size = min(chosen.batch, 4) if chosen.tiny else chosen.batch
    if not chosen.section:
        arguments = ["--batch", str(batch_size), *(["--eager"] if chosen.eager else [])]
        print_table(run_sections(__file__, SECTIONS, chosen, arguments))
        return
    torch.manual_seed(0)
    torch.set_num_threads(1 if chosen.tiny else torch.get_num_threads())
    measures: dict[str, Callable[..., Any]] = {
        "matmul": measure_matmul,
        "vae": measure_vae,
        "vae-diffusers": measure_vae,
    }
    with tempfile.TemporaryDirectory() as folder:
        compiled = CUDA and not chosen.eager and not chosen.tiny
        options = DitOptions(chosen.tiny, compiled, batch_size, Path(folder), section_deadline(chosen) - 3)
        measures.get(chosen.section, measure_dit)(options, chosen.section, result_writer(chosen.out))


if __name__ == "__main__":
    main()
