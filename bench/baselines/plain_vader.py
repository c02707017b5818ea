"""Baseline: VADER on a video UNet as one would write it with diffusers, peft and PyTorch, one video at a time.

Frozen weights, decoder and reward in bf16, adapters in float32, fused attention, both halves of guidance in one call,
gradient checkpointing, and gradients through the last step only: nothing is slow on purpose.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from diffusers import AutoencoderKL, DDIMScheduler, UNet3DConditionModel
from peft import LoraConfig, inject_adapter_in_model
from plain_srpo import MEAN, STD, create_network, reward_network, time_call
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tastemaker.models.modelscope import CONFIGS, TINY_CONFIGS

VIDEOS_PER_UPDATE = 8


class VaderTrainer:
    def __init__(self, device: torch.device, tiny: bool, shape: tuple[int, int, int], guidance: float) -> None:
        sizes = TINY_CONFIGS if tiny else CONFIGS
        self.device, self.guidance, self.steps = device, guidance, 4 if tiny else 25
        self.frames, self.height, self.width = (2, 32, 32) if tiny else shape
        self.net: Any = (
            create_network(lambda: UNet3DConditionModel(**sizes["unet"]), device).eval().requires_grad_(False)
        )
        inject_adapter_in_model(LoraConfig(r=16, lora_alpha=8, target_modules=["to_q", "to_k", "to_v"]), self.net)
        self.adapters = [p for p in self.net.parameters() if p.requires_grad]
        for p in self.adapters:
            p.data = p.data.float()
        self._checkpoint()
        self.vae: Any = create_network(lambda: AutoencoderKL(**sizes["vae"]), device).requires_grad_(False)
        self.vae.enable_gradient_checkpointing()
        self.vae.train()
        self.clip = create_network(lambda: reward_network(tiny), device).eval().requires_grad_(False)
        self.optimizer = torch.optim.AdamW(self.adapters, 2e-4, weight_decay=0.01)
        self.words = torch.randn(2, 77, sizes["unet"]["cross_attention_dim"], device=device, dtype=torch.bfloat16)
        self.scheduler = DDIMScheduler(
            beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear", clip_sample=False,
            set_alpha_to_one=False, steps_offset=1,
        )  # fmt: skip

    def _checkpoint(self) -> None:
        """Checkpoint residual and transformer blocks as VADER does; diffusers does not support it for this network."""
        for module in self.net.modules():
            if type(module).__name__ in ("ResnetBlock2D", "TemporalConvLayer", "BasicTransformerBlock"):
                module.forward = partial(checkpoint, module.forward, use_reentrant=False)

    def noise(self, x: Tensor, t: Tensor) -> Tensor:
        with torch.autocast(self.device.type, torch.bfloat16):
            output = self.net(torch.cat([x, x]).bfloat16(), t, self.words, return_dict=False)[0].float()
        uncond, cond = output.chunk(2)
        return uncond + self.guidance * (cond - uncond)

    def sample(self, steps: int) -> Tensor:
        self.scheduler.set_timesteps(steps, device=self.device)
        x = torch.randn(1, 4, self.frames, self.height // 8, self.width // 8, device=self.device)
        for i, t in enumerate(self.scheduler.timesteps):
            with torch.set_grad_enabled(i == steps - 1):
                x = self.scheduler.step(self.noise(x, t), t, x, return_dict=False)[0]
        return x

    def score(self, pixels: Tensor) -> Tensor:
        resized = F.interpolate(pixels, (224, 224), mode="bicubic", antialias=True)
        mean, std = (torch.tensor(x, device=self.device).view(1, 3, 1, 1) for x in (MEAN, STD))
        features = self.clip.get_image_features(pixel_values=((resized - mean) / std).bfloat16()).pooler_output
        with torch.no_grad():
            texts = torch.randint(1, 400, (1, 77), device=self.device)
            words = self.clip.get_text_features(input_ids=texts).pooler_output
        return (F.normalize(features.float(), dim=-1) @ F.normalize(words.float(), dim=-1).t()).mean()

    def train_prompt(self, steps: int, all_frames: bool) -> None:
        x = self.sample(steps)[0].transpose(0, 1)  # [F, 4, h, w]
        latents = x if all_frames else x[torch.randint(self.frames, (1,)).item()][None]
        decoded = self.vae.decode((latents / 0.18215).bfloat16(), return_dict=False)[0].float()
        ((1 - self.score((decoded / 2 + 0.5).clamp(0, 1))) / VIDEOS_PER_UPDATE).backward()

    def update(self) -> None:
        nn.utils.clip_grad_norm_(self.adapters, 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()


def measure(
    device: torch.device, tiny: bool, shape: tuple[int, int, int], guidance: float, log: Callable[[str], None]
) -> Iterator[dict[str, Any]]:
    """Measure the minimal time per video, with one frame decoded and with all frames. Yields each result at once."""
    trainer = VaderTrainer(device, tiny, shape, guidance)
    log("built")
    for all_frames in (False, True):
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        trainer.train_prompt(2, all_frames)
        trainer.update()
        times = 1 if all_frames else 2
        seconds = [time_call(lambda: trainer.train_prompt(trainer.steps, all_frames), device) for _ in range(times)]  # noqa: B023
        update = time_call(trainer.update, device)
        peak = torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else 0.0
        per_video = min(seconds) + update / VIDEOS_PER_UPDATE
        frames = "all frames" if all_frames else "one frame"
        log(f"{frames}: {per_video:.3f} s per video, {peak:.1f} GiB")
        yield {"frames": frames, "seconds per prompt": per_video, "peak GiB": peak, "batch": "1 video at a time"}
