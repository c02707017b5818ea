"""SRPO on FLUX as one would write it with diffusers and PyTorch: a prompt at a time, one branch after the other.

bf16, fused attention and AdamW, frozen decoder and reward, gradient checkpointing: nothing is made slow on purpose.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from diffusers import AutoencoderKL, FluxTransformer2DModel
from torch import Tensor, nn
from transformers import CLIPConfig, CLIPModel

from tastemaker.models.component_configs import FLUX_DEV
from tastemaker.models.flux import SMALL

UPDATE = 8  # prompts an update
MEAN, STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)


def made(make: Callable[[], nn.Module], device: torch.device) -> Any:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(device):
            return make()
    finally:
        torch.set_default_dtype(before)


def reward_network(tiny: bool) -> nn.Module:
    """CLIP ViT-H/14, or a small one."""
    wide = [32, 64, 2, 2] if tiny else [1280, 5120, 32, 16]
    long = [32, 64, 2, 2] if tiny else [1024, 4096, 24, 16]
    names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    return CLIPModel(
        CLIPConfig(
            text_config=dict(zip(names, long, strict=True)) | {"vocab_size": 49408},
            vision_config=dict(zip(names, wide, strict=True)) | {"image_size": 224, "patch_size": 14},
            projection_dim=1024,
        )
    )


class Trainer:
    def __init__(self, device: torch.device, tiny: bool) -> None:
        sizes = SMALL if tiny else FLUX_DEV
        self.device, self.steps = device, 4 if tiny else 25
        self.net = made(lambda: FluxTransformer2DModel(**sizes["transformer"]), device).train()
        self.net.enable_gradient_checkpointing()
        self.vae = made(lambda: AutoencoderKL(**sizes["vae"]), device).requires_grad_(False)
        self.vae.enable_gradient_checkpointing()
        self.vae.train()  # diffusers checkpoints only then; it has no dropout
        self.clip = made(lambda: reward_network(tiny), device).eval().requires_grad_(False)
        self.adam = torch.optim.AdamW(self.net.parameters(), 1e-6, weight_decay=1e-4, fused=device.type == "cuda")
        side, words = (32, 16) if tiny else (720, 512)
        config, draw = sizes["transformer"], {"device": device, "dtype": torch.bfloat16}
        self.side, self.tokens, self.width = side, (side // 16) ** 2, config["in_channels"]
        self.words = torch.randn(1, words, config["joint_attention_dim"], **draw)
        self.pooled = torch.randn(1, config["pooled_projection_dim"], **draw)
        rows, columns = torch.meshgrid(torch.arange(side // 16), torch.arange(side // 16), indexing="ij")
        self.places = torch.stack([torch.zeros_like(rows), rows, columns], -1).reshape(-1, 3).to(**draw)
        self.no_places = torch.zeros(words, 3, **draw)
        grid = torch.linspace(1, 0, self.steps + 1, device=device)
        self.levels = 3 * grid / (1 + 2 * grid)

    def velocity(self, x: Tensor, level: Tensor, guidance: float) -> Tensor:
        out: Tensor = self.net(
            hidden_states=x.bfloat16(),
            timestep=level.expand(1).bfloat16(),
            guidance=torch.full((1,), guidance, device=self.device, dtype=torch.bfloat16),
            encoder_hidden_states=self.words,
            pooled_projections=self.pooled,
            txt_ids=self.no_places,
            img_ids=self.places,
            return_dict=False,
        )[0]
        return out.float()

    @torch.no_grad()
    def sample(self, noise: Tensor, steps: int) -> Tensor:
        x = noise
        for high, low in zip(self.levels[:steps], self.levels[1 : steps + 1], strict=True):
            x = x + (low - high) * self.velocity(x, high, 1.0)
        return x

    def picture(self, packed: Tensor) -> Tensor:
        half, channels = self.side // 16, self.width // 4
        latents = packed.view(1, half, half, channels, 2, 2).permute(0, 3, 1, 4, 2, 5)
        latents = latents.reshape(1, channels, 2 * half, 2 * half) / 0.3611 + 0.1159
        return (self.vae.decode(latents.bfloat16(), return_dict=False)[0].float() / 2 + 0.5).clamp(0, 1)

    def score(self, pixels: Tensor, texts: Tensor) -> Tensor:
        seen = F.interpolate(pixels, (224, 224), mode="bicubic", antialias=True)
        mean, std = (torch.tensor(x, device=self.device).view(1, 3, 1, 1) for x in (MEAN, STD))
        features = self.clip.get_image_features(pixel_values=((seen - mean) / std).bfloat16()).pooler_output
        with torch.no_grad():
            words = self.clip.get_text_features(input_ids=texts).pooler_output
        cosines = F.normalize(features.float(), dim=-1) @ F.normalize(words.float(), dim=-1).t()
        return 1.2 * cosines[0, 0] - cosines[0, 1]

    def branch(self, clean: Tensor, noise: Tensor, source: float, target: float, texts: Tensor) -> None:
        level = torch.tensor(source, device=self.device)
        x = (1 - source) * clean + source * noise
        # PyTorch 2.11's own choice, cuDNN, ends in an illegal memory access in FLUX's backward pass.
        torch.backends.cuda.enable_cudnn_sdp(False)
        moved = x + (target - source) * self.velocity(x, level, 3.5)
        pixels = self.picture((moved - target * noise) / (1 - target))
        (F.relu(0.7 - self.score(pixels, texts)) / 2 / UPDATE).backward()
        torch.backends.cuda.enable_cudnn_sdp(True)

    def prompt(self, steps: int) -> None:
        noise = torch.randn(1, self.tokens, self.width, device=self.device)
        clean = self.sample(noise, steps)
        texts = torch.randint(1, 400, (2, 77), device=self.device)
        self.branch(clean, noise, 0.878, 0.857, texts)
        self.branch(clean, noise, 0.836, 0.857, texts.flip(0))

    def update(self) -> None:
        nn.utils.clip_grad_norm_(self.net.parameters(), 0.1)
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


def measure(device: torch.device, tiny: bool, say: Callable[[str], None]) -> dict[str, Any]:
    """Seconds a prompt at its best, the update shared out over the prompts of one."""
    trainer = Trainer(device, tiny)
    say("built")
    trainer.prompt(2)
    trainer.update()
    prompts = []
    for _ in range(3):
        prompts.append(clocked(lambda: trainer.prompt(trainer.steps), device))
        say(f"a prompt in {prompts[-1]:.3f} s")
    update = clocked(trainer.update, device)
    peak = torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else 0.0
    with torch.no_grad():
        x = torch.randn(1, trainer.tokens, trainer.width, device=device)
        alone = min(clocked(lambda: trainer.velocity(x, trainer.levels[1], 1.0).sum().item(), device) for _ in range(3))
    each = min(prompts) + update / UPDATE
    say(f"{each:.3f} s a prompt, {update / UPDATE:.3f} s of it updates; a forward pass {alone:.4f} s; {peak:.1f} GiB")
    found = {"seconds a prompt": each, "peak GiB": peak, "update s": update, "forward ms": 1000 * alone}
    return {"batch": f"1 prompt at a time, an update after {UPDATE}", **found}
