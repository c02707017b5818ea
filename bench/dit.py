"""How fast DiT-XL/2 learns at 256x256, how near that is to what matrix products reach, and how fast a VAE learns.

    python bench/dit.py --out dit.json            # on one GPU
    python bench/dit.py --tiny --out tiny.json    # the same lines at small size, on any machine

A forward pass of DiT-XL/2 is 237 GFLOP a picture (256 tokens), a training step three times that: 711, so that 64
pictures take 45.5 TFLOP, or 58 ms at the 790 TFLOP/s that large products in bfloat16 reach on an H200. Operations are
counted. Every section is a process of its own with a time limit, which tells each number once it is known.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from device import CUDA, gib, settle  # beside this file, in no package
from sections import Found, Keep, carry_out, deadline, keeper, say
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from tastemaker.autoencoders import training
from tastemaker.config.build import build, build_autoencoder
from tastemaker.config.load import load, load_any_config
from tastemaker.core.types import ImageBatch, LatentBatch, PromptBatch
from tastemaker.models.latent_dit.model import LatentDit
from tastemaker.models.nets.latent_dit import LatentDiT
from tastemaker.training.loop import launch_train_step

SECTIONS = {"latents": 65, "vae-diffusers": 25, "vae": 25, "pictures": 65, "limit": 20}  # seconds at most
USUAL = "latents,vae-diffusers,vae,pictures"  # the first of which tells what products reach as well
SMALL_VAE = {"block_out_channels": (8, 8, 8, 8), "norm_num_groups": 4, "layers_per_block": 1, "latent_channels": 4}
LARGE_VAE = {"block_out_channels": (128, 256, 512, 512), "layers_per_block": 2, "latent_channels": 4}


@dataclass(frozen=True)
class Options:
    tiny: bool
    compile: bool
    batch: int
    folder: Path
    deadline: float  # of time.monotonic()

    @property
    def pixels(self) -> int:
        return 32 if self.tiny else 256


@dataclass(frozen=True)
class Noise:
    """Rows that cost nothing to read, the same every time."""

    rows: Any

    def __len__(self) -> int:
        return len(self.rows)

    def batch(self, step: int, size: int, rank: int, world: int) -> Any:
        return self.rows

    def first(self, count: int) -> PromptBatch:
        return PromptBatch(("0",) * count, ({},) * count)


def median(begin: Callable[[int], Callable[[], Any]], options: Options, section: str, most: int) -> float:
    """Seconds a step, after three to warm up and compile; the median of as many as fit, each begun before the one
    before it is told, as in training."""
    began = time.perf_counter()
    for number in range(3):
        begin(number)()
        settle()
        say(section, f"step {number + 1} after {time.perf_counter() - began:.1f} s")
    found: list[float] = []
    began, waiting = time.perf_counter(), begin(3)
    while len(found) < most and (not found or time.monotonic() + 2 * found[0] < options.deadline):
        following = begin(4 + len(found))
        waiting()
        waiting, at = following, time.perf_counter()
        found.append(at - began)
        began = at
    settle()
    return sorted(found[1:] or found)[len(found[1:]) // 2]  # the first was begun with nothing before it


def limit(options: Options, section: str, keep: Keep) -> float:
    """TFLOP/s that large matrix products reach in bfloat16, for the share of it."""
    side, device = (256, "cpu") if options.tiny else (8192, "cuda" if CUDA else "cpu")
    a, b = (torch.randn(side, side, device=device, dtype=torch.bfloat16) for _ in range(2))
    for _ in range(3):
        a @ b
    best = 0.0
    for _ in range(3):
        settle()
        began = time.perf_counter()
        for _ in range(20):
            a @ b
        settle()
        best = max(best, 20 * 2 * side**3 / (time.perf_counter() - began) / 1e12)
    say(section, f"{side}x{side} products in bfloat16: {best:.4g} TFLOP/s")
    keep({"section": section, "limit": best})
    return best


def codec(options: Options, *, used: bool) -> Path:
    """A random autoencoder in diffusers' layout, of Stable Diffusion's size if it is to be used."""
    import diffusers

    kind: Any = diffusers.AutoencoderKL
    levels, sizes = 4, LARGE_VAE if used and not options.tiny else SMALL_VAE
    blocks = {
        "down_block_types": ("DownEncoderBlock2D",) * levels,
        "up_block_types": ("UpDecoderBlock2D",) * levels,
    }
    with torch.device("cuda" if CUDA else "cpu"):
        net = kind(**blocks, **sizes)
    net.save_pretrained(options.folder / "vae")
    return options.folder / "vae"


def dit(options: Options, source: Path) -> Any:
    spec = LatentDit(
        size="XL", told="class", codec=str(source), pixels=options.pixels, patch=2, channels=4, factor=8, sigma=True
    )
    return replace(spec, width=32, depth=2, heads=2) if options.tiny else spec


def operations(spec: LatentDit) -> float:
    """Of a forward pass of one picture, counted without a device."""
    with torch.device("meta"):
        net = LatentDiT(spec.net())
        x, t, kind = torch.randn(1, *spec.shape[1:]), torch.zeros(1), torch.zeros(1, dtype=torch.long)
    counter: Any = FlopCounterMode(display=False)
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), counter:
        net(x, t, kind)
    return float(counter.get_total_flops())


def generator(options: Options, section: str, keep: Keep) -> None:
    """A whole training step as `tastemaker train` does it: noise, forward, backward, AdamW and the average."""
    reach = limit(options, section, keep) if section == "latents" else None
    spec = dit(options, codec(options, used=section == "pictures"))
    precision = "bf16" if CUDA else "fp32"
    changes = [f"engine={{precision: {precision}, compile: {str(options.compile).lower()}}}", "optim.lr=1e-4"]
    config = replace(load("dit-folder", [*changes, f"batch.prompts={options.batch}", "sample.every=0"]), model=spec)
    run = build(config, options.folder / "run")
    model: Any = run.policy.model
    prompts = tuple(str(i % 1000) for i in range(options.batch))
    if section == "latents":
        x = torch.randn(options.batch, *model.shape[1:])  # as data are made ahead, where a GPU can fetch them
        rows: Any = LatentBatch(prompts, x.pin_memory() if CUDA else x, model.fingerprint, 1.0)
    else:
        rows = ImageBatch(prompts, torch.rand(options.batch, *model.pixels, device=run.engine.device))
    run.data = Noise(rows)
    forward = operations(spec)
    say(
        section,
        f"{sum(p.numel() for p in model.net.parameters()) / 1e6:.1f} M weights, {forward / 1e9:.1f} GFLOP forward",
    )
    seconds = median(lambda step: launch_train_step(run, step), options, section, 3 if options.tiny else 15)
    rate = options.batch / seconds
    reached = 3 * forward * rate / 1e12
    share = f", {reached / reach:.0%} of what products reach" if reach else ""
    told = f"{rate:.1f} pictures/s, {reached:.4g} TFLOP/s{share}"
    say(section, f"{seconds * 1e3:.1f} ms a step of {options.batch}: {told}; {gib():.1f} GiB")
    numbers = {"pictures/s": rate, "ms": seconds * 1e3, "TFLOP/s": reached, "GiB": gib(), "batch": options.batch}
    keep({"section": section, "GFLOP": forward / 1e9, **numbers})


def vae(options: Options, section: str, keep: Keep) -> None:
    """A step of the autoencoder's recipe without LPIPS, whose weights would have to be fetched; the critic plays."""
    recipe = "vae-celebhq" if section == "vae" else "vae-diffusers"
    precision, rows = ("bf16" if CUDA else "fp32"), 2 if options.tiny else 16
    changes = [f"engine.precision={precision}", "loss.lpips=0", "critic.start=0", f"rows={rows}", "validation.every=0"]
    config: Any = load_any_config(recipe, [*changes, "sample.every=0"])
    if options.tiny:
        config = replace(config, autoencoder=config.autoencoder.tiny(), critic=replace(config.critic, width=8))
    run = build_autoencoder(config, options.folder / "run")
    pixels = torch.rand(rows, 1, 3, options.pixels, options.pixels, device=run.engine.device)
    run.data = Noise(ImageBatch(("",) * rows, pixels))
    seconds = median(lambda step: training.launch_train_step(run, step), options, section, 3 if options.tiny else 7)
    count = sum(p.numel() for p in run.net.parameters()) / 1e6
    say(section, f"{count:.1f} M weights: {seconds * 1e3:.1f} ms a step of {rows}, {rows / seconds:.1f} pictures/s")
    keep({"section": section, "pictures/s": rows / seconds, "ms": seconds * 1e3, "GiB": gib(), "batch": rows})


def work(section: str, options: Options, keep: Keep) -> None:
    kinds: dict[str, Callable[..., Any]] = {"limit": limit, "vae": vae, "vae-diffusers": vae}
    kinds.get(section, generator)(options, section, keep)


def table(found: Found) -> None:
    reach = next((line["limit"] for line in found if "limit" in line), None)
    print(f"\n{torch.cuda.get_device_name() if CUDA else 'cpu'}, PyTorch {torch.__version__}")
    print("| what | batch | ms a step | pictures/s | TFLOP/s | of the products' limit | peak GiB |")
    print("|---|---|---|---|---|---|---|")
    for line in found:
        if "pictures/s" not in line:
            continue
        speed = line.get("TFLOP/s")
        share = f"{speed / reach:.0%}" if speed and reach else ""
        first = f"| {line['section']} | {line['batch']} | {line['ms']:.1f} | {line['pictures/s']:.1f}"
        print(f"{first} | {f'{speed:.4g}' if speed else ''} | {share} | {line['GiB']:.1f} |")


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("--tiny", action="store_true")
    options.add_argument("--out", default="")
    options.add_argument("--sections", default=USUAL)
    options.add_argument("--batch", type=int, default=64)
    options.add_argument("--seconds", type=float, default=112.0, help="of all sections together")
    options.add_argument("--slack", type=float, default=1.0, help="factor on each section's own limit")
    options.add_argument("--plain", action="store_true", help="compile nothing")
    options.add_argument("--section", default="")
    chosen = options.parse_args()
    chosen.batch = min(chosen.batch, 4) if chosen.tiny else chosen.batch
    if not chosen.section:
        limits = {name: most * chosen.slack for name, most in SECTIONS.items()}
        more = ["--batch", str(chosen.batch), *(["--plain"] if chosen.plain else [])]
        table(carry_out(__file__, limits, chosen, more))
        return
    torch.manual_seed(0)
    torch.set_num_threads(1 if chosen.tiny else torch.get_num_threads())
    with tempfile.TemporaryDirectory() as folder:
        compiled = CUDA and not chosen.plain and not chosen.tiny
        told = Options(chosen.tiny, compiled, chosen.batch, Path(folder), deadline(chosen) - 3)
        work(chosen.section, told, keeper(chosen.out))


if __name__ == "__main__":
    main()
