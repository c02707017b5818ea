"""VADER on a UNet of clips as one would write it with diffusers, peft and PyTorch: one clip at a time.

Frozen weights, decoder and reward in bf16, adapters in float32, fused attention, both halves of guidance in one call,
gradient checkpointing, and the graph of the last step alone: nothing is made slow on purpose.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from diffusers import AutoencoderKL, DDIMScheduler, UNet3DConditionModel
from peft import LoraConfig, inject_adapter_in_model
from plain_srpo import MEAN, STD, made, reward_network
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tastemaker.models.component_configs import MODELSCOPE
from tastemaker.models.video_unet import SMALL

UPDATE = 8  # clips an update


class Trainer:
    def __init__(self, device: torch.device, tiny: bool, shape: tuple[int, int, int], guidance: float) -> None:
        sizes = SMALL if tiny else MODELSCOPE
        self.device, self.guidance, self.steps = device, guidance, 4 if tiny else 25
        self.frames, self.height, self.width = (2, 32, 32) if tiny else shape
        self.net: Any = made(lambda: UNet3DConditionModel(**sizes["unet"]), device).eval().requires_grad_(False)
        inject_adapter_in_model(LoraConfig(r=16, lora_alpha=8, target_modules=["to_q", "to_k", "to_v"]), self.net)
        self.adapters = [p for p in self.net.parameters() if p.requires_grad]
        for p in self.adapters:
            p.data = p.data.float()
        self._checkpoint()
        self.vae: Any = made(lambda: AutoencoderKL(**sizes["vae"]), device).requires_grad_(False)
        self.vae.enable_gradient_checkpointing()
        self.vae.train()
        self.clip = made(lambda: reward_network(tiny), device).eval().requires_grad_(False)
        self.adam = torch.optim.AdamW(self.adapters, 2e-4, weight_decay=0.01)
        self.words = torch.randn(2, 77, sizes["unet"]["cross_attention_dim"], device=device, dtype=torch.bfloat16)
        self.scheduler = DDIMScheduler(
            beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear", clip_sample=False,
            set_alpha_to_one=False, steps_offset=1,
        )  # fmt: skip

    def _checkpoint(self) -> None:
        """Which diffusers does not offer for this network any more: residual and transformer blocks, as VADER's own."""
        for module in self.net.modules():
            if type(module).__name__ in ("ResnetBlock2D", "TemporalConvLayer", "BasicTransformerBlock"):
                module.forward = partial(checkpoint, module.forward, use_reentrant=False)

    def noise(self, x: Tensor, t: Tensor) -> Tensor:
        with torch.autocast(self.device.type, torch.bfloat16):
            both = self.net(torch.cat([x, x]).bfloat16(), t, self.words, return_dict=False)[0].float()
        without, given = both.chunk(2)
        return without + self.guidance * (given - without)

    def sample(self, steps: int) -> Tensor:
        self.scheduler.set_timesteps(steps, device=self.device)
        x = torch.randn(1, 4, self.frames, self.height // 8, self.width // 8, device=self.device)
        for i, t in enumerate(self.scheduler.timesteps):
            with torch.set_grad_enabled(i == steps - 1):
                x = self.scheduler.step(self.noise(x, t), t, x, return_dict=False)[0]
        return x

    def score(self, pixels: Tensor) -> Tensor:
        seen = F.interpolate(pixels, (224, 224), mode="bicubic", antialias=True)
        mean, std = (torch.tensor(x, device=self.device).view(1, 3, 1, 1) for x in (MEAN, STD))
        features = self.clip.get_image_features(pixel_values=((seen - mean) / std).bfloat16()).pooler_output
        with torch.no_grad():
            texts = torch.randint(1, 400, (1, 77), device=self.device)
            words = self.clip.get_text_features(input_ids=texts).pooler_output
        return (F.normalize(features.float(), dim=-1) @ F.normalize(words.float(), dim=-1).t()).mean()

    def prompt(self, steps: int, every: bool) -> None:
        x = self.sample(steps)[0].transpose(0, 1)  # [F, 4, h, w]
        latents = x if every else x[torch.randint(self.frames, (1,)).item()][None]
        shown = self.vae.decode((latents / 0.18215).bfloat16(), return_dict=False)[0].float()
        ((1 - self.score((shown / 2 + 0.5).clamp(0, 1))) / UPDATE).backward()

    def update(self) -> None:
        nn.utils.clip_grad_norm_(self.adapters, 1.0)
        self.adam.step()
        self.adam.zero_grad()


def clocked(work: Callable[[], None], device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize()
    began = time.perf_counter()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - began


def measure(
    device: torch.device, tiny: bool, shape: tuple[int, int, int], guidance: float, say: Callable[[str], None]
) -> Iterator[dict[str, Any]]:
    """Seconds a clip at its best, with one frame decoded and with all of them, each as soon as it is known."""
    trainer = Trainer(device, tiny, shape, guidance)
    say("built")
    for every in (False, True):
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        trainer.prompt(2, every)
        trainer.update()
        times = 1 if every else 2
        spent = [clocked(lambda: trainer.prompt(trainer.steps, every), device) for _ in range(times)]  # noqa: B023
        update = clocked(trainer.update, device)
        peak = torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else 0.0
        each = min(spent) + update / UPDATE
        frames = "all frames" if every else "one frame"
        say(f"{frames}: {each:.3f} s a clip, {peak:.1f} GiB")
        yield {"frames": frames, "seconds a prompt": each, "peak GiB": peak, "batch": "1 clip at a time"}
