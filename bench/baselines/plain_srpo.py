"""Baseline: SRPO on FLUX as one would write it with diffusers and PyTorch, one prompt and one branch at a time.

bf16, fused attention and AdamW, frozen decoder and reward, gradient checkpointing: nothing is slow on purpose.
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

from tastemaker.models.flux import FLUX_DEV, TINY_CONFIGS

PROMPTS_PER_UPDATE = 8
MEAN, STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)


def create_network(create: Callable[[], nn.Module], device: torch.device) -> Any:
    """Create a network with random bf16 weights on the device."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(device):
            return create()
    finally:
        torch.set_default_dtype(before)


def reward_network(tiny: bool) -> nn.Module:
    """CLIP ViT-H/14, or a small CLIP."""
    vision = [32, 64, 2, 2] if tiny else [1280, 5120, 32, 16]
    text = [32, 64, 2, 2] if tiny else [1024, 4096, 24, 16]
    names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    return CLIPModel(
        CLIPConfig(
            text_config=dict(zip(names, text, strict=True)) | {"vocab_size": 49408},
            vision_config=dict(zip(names, vision, strict=True)) | {"image_size": 224, "patch_size": 14},
            projection_dim=1024,
        )
    )


class SrpoTrainer:
    def __init__(self, device: torch.device, tiny: bool) -> None:
        sizes = TINY_CONFIGS if tiny else FLUX_DEV
        self.device, self.steps = device, 4 if tiny else 25
        self.net = create_network(lambda: FluxTransformer2DModel(**sizes["transformer"]), device).train()
        self.net.enable_gradient_checkpointing()
        self.vae = create_network(lambda: AutoencoderKL(**sizes["vae"]), device).requires_grad_(False)
        self.vae.enable_gradient_checkpointing()
        self.vae.train()  # diffusers checkpoints only then; it has no dropout
        self.clip = create_network(lambda: reward_network(tiny), device).eval().requires_grad_(False)
        self.optimizer = torch.optim.AdamW(self.net.parameters(), 1e-6, weight_decay=1e-4, fused=device.type == "cuda")
        side, words = (32, 16) if tiny else (720, 512)
        config, draw = sizes["transformer"], {"device": device, "dtype": torch.bfloat16}
        self.side, self.tokens, self.width = (side, (side // 16) ** 2, config["in_channels"])
        self.words = torch.randn(1, words, config["joint_attention_dim"], **draw)
        self.pooled = torch.randn(1, config["pooled_projection_dim"], **draw)
        rows, columns = torch.meshgrid(torch.arange(side // 16), torch.arange(side // 16), indexing="ij")
        self.positions = torch.stack([torch.zeros_like(rows), rows, columns], -1).reshape(-1, 3).to(**draw)
        self.text_positions = torch.zeros(words, 3, **draw)
        grid = torch.linspace(1, 0, self.steps + 1, device=device)
        self.sigmas = 3 * grid / (1 + 2 * grid)

    def velocity(self, x: Tensor, sigma: Tensor, guidance: float) -> Tensor:
        out: Tensor = self.net(
            hidden_states=x.bfloat16(),
            timestep=sigma.expand(1).bfloat16(),
            guidance=torch.full((1,), guidance, device=self.device, dtype=torch.bfloat16),
            encoder_hidden_states=self.words,
            pooled_projections=self.pooled,
            txt_ids=self.text_positions,
            img_ids=self.positions,
            return_dict=False,
        )[0]
        return out.float()

    @torch.no_grad()
    def sample(self, noise: Tensor, steps: int) -> Tensor:
        x = noise
        for sigma, next_sigma in zip(self.sigmas[:steps], self.sigmas[1 : steps + 1], strict=True):
            x = x + (next_sigma - sigma) * self.velocity(x, sigma, 1.0)
        return x

    def decode(self, packed: Tensor) -> Tensor:
        half, channels = self.side // 16, self.width // 4
        latents = packed.view(1, half, half, channels, 2, 2).permute(0, 3, 1, 4, 2, 5)
        latents = latents.reshape(1, channels, 2 * half, 2 * half) / 0.3611 + 0.1159
        return (self.vae.decode(latents.bfloat16(), return_dict=False)[0].float() / 2 + 0.5).clamp(0, 1)

    def score(self, pixels: Tensor, texts: Tensor) -> Tensor:
        resized = F.interpolate(pixels, (224, 224), mode="bicubic", antialias=True)
        mean, std = (torch.tensor(x, device=self.device).view(1, 3, 1, 1) for x in (MEAN, STD))
        features = self.clip.get_image_features(pixel_values=((resized - mean) / std).bfloat16()).pooler_output
        with torch.no_grad():
            words = self.clip.get_text_features(input_ids=texts).pooler_output
        cosines = F.normalize(features.float(), dim=-1) @ F.normalize(words.float(), dim=-1).t()
        return 1.2 * cosines[0, 0] - cosines[0, 1]

    def branch(self, clean: Tensor, noise: Tensor, source: float, target: float, texts: Tensor) -> None:
        sigma = torch.tensor(source, device=self.device)
        x = (1 - source) * clean + source * noise
        # cuDNN attention, the default of PyTorch 2.11, crashes in FLUX's backward pass with an illegal memory access.
        torch.backends.cuda.enable_cudnn_sdp(False)
        stepped = x + (target - source) * self.velocity(x, sigma, 3.5)
        pixels = self.decode((stepped - target * noise) / (1 - target))
        (F.relu(0.7 - self.score(pixels, texts)) / 2 / PROMPTS_PER_UPDATE).backward()
        torch.backends.cuda.enable_cudnn_sdp(True)

    def train_prompt(self, steps: int) -> None:
        noise = torch.randn(1, self.tokens, self.width, device=self.device)
        clean = self.sample(noise, steps)
        texts = torch.randint(1, 400, (2, 77), device=self.device)
        self.branch(clean, noise, 0.878, 0.857, texts)
        self.branch(clean, noise, 0.836, 0.857, texts.flip(0))

    def update(self) -> None:
        nn.utils.clip_grad_norm_(self.net.parameters(), 0.1)
        self.optimizer.step()
        self.optimizer.zero_grad()


def time_call(work: Callable[[], None], device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def measure(device: torch.device, tiny: bool, log: Callable[[str], None]) -> dict[str, Any]:
    """Measure the minimal time per prompt, with its share of the optimizer step."""
    trainer = SrpoTrainer(device, tiny)
    log("built")
    trainer.train_prompt(2)
    trainer.update()
    times = []
    for _ in range(3):
        times.append(time_call(lambda: trainer.train_prompt(trainer.steps), device))
        log(f"one prompt in {times[-1]:.3f} s")
    update = time_call(trainer.update, device)
    peak = torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else 0.0
    with torch.no_grad():
        x = torch.randn(1, trainer.tokens, trainer.width, device=device)
        forward = min(
            time_call(lambda: trainer.velocity(x, trainer.sigmas[1], 1.0).sum().item(), device) for _ in range(3)
        )
    per_prompt = min(times) + update / PROMPTS_PER_UPDATE
    parts = f"{update / PROMPTS_PER_UPDATE:.3f} s of it updates; a forward pass takes {forward:.4f} s"
    log(f"{per_prompt:.3f} s per prompt, {parts}; {peak:.1f} GiB")
    result = {"seconds per prompt": per_prompt, "peak GiB": peak, "update s": update, "forward ms": 1000 * forward}
    return {"batch": f"1 prompt at a time, {PROMPTS_PER_UPDATE} per update", **result}
