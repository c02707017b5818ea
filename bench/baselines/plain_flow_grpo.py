"""Baseline: Flow-GRPO on SD3.5 medium with LoRA as one would write it with diffusers and peft, as its trainer does.

bf16 autocast over frozen bf16 weights with float32 adapters, guidance by a doubled batch, fused attention and AdamW.
One timestep of the whole group at a time; gradients are accumulated over all timesteps before one optimizer step.
Activations are kept, nothing is compiled, and nothing is slow on purpose.

Lower bound for a group of 8 at 512x512 with 10 steps: a forward pass is 2.46 TFLOP (1024 image and 333 text tokens), of
which the rollout makes 160 and the update 144, where the backward pass without the gradient of frozen weights costs as
much again. That is 1.10 PFLOP, 1.4 s at 790 TFLOP/s; with activation checkpointing 1.46 PFLOP, 1.85 s.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from diffusers import AutoencoderKL, SD3Transformer2DModel
from peft import LoraConfig, get_peft_model
from plain_srpo import MEAN, STD, create_network, reward_network  # beside this file, in no package
from torch import Tensor, nn

from tastemaker.models.sd3 import SD35_MEDIUM, TINY_CONFIGS

ADAPTED = ["to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out"]
RANK, GUIDANCE, NOISE_LEVEL, CLIP_RANGE, ADVANTAGE_CLIP = 16, 4.5, 0.7, 1e-4, 5.0
LATENT_CHANNELS = 16


class FlowGrpoTrainer:
    def __init__(self, device: torch.device, tiny: bool) -> None:
        sizes = TINY_CONFIGS if tiny else SD35_MEDIUM
        self.device, self.steps, self.group = device, 4 if tiny else 10, 4 if tiny else 8
        net = create_network(lambda: SD3Transformer2DModel(**sizes["transformer"]), device).requires_grad_(False)
        lora = LoraConfig(r=RANK, lora_alpha=2 * RANK, init_lora_weights="gaussian", target_modules=ADAPTED)
        self.net: Any = get_peft_model(net, lora)  # casts the adapters to float32
        self.vae = create_network(lambda: AutoencoderKL(**sizes["vae"]), device).eval().requires_grad_(False)
        self.clip = create_network(lambda: reward_network(tiny), device).eval().requires_grad_(False)
        self.trained = [p for p in self.net.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(self.trained, 1e-6, weight_decay=1e-4, fused=device.type == "cuda")
        self.side, self.scaling, self.shift = (4 if tiny else 64), sizes["vae"]["scaling_factor"], 0.0609
        config, draw = sizes["transformer"], {"device": device, "dtype": torch.bfloat16}
        words = (93 if tiny else 333, config["joint_attention_dim"])
        # The prompt's and the empty prompt's, for all samples of the group.
        self.words = torch.randn(2, 1, *words, **draw).expand(2, self.group, *words).flatten(0, 1)
        pooled = torch.randn(2, 1, config["pooled_projection_dim"], **draw)
        self.pooled = pooled.expand(2, self.group, -1).flatten(0, 1)
        grid = torch.linspace(1, 0, self.steps + 1, device=device)
        self.sigmas = 3 * grid / (1 + 2 * grid)
        self.seconds: dict[str, float] = defaultdict(float)

    def velocity(self, x: Tensor, sigma: Tensor) -> Tensor:
        """The guided velocity of samples at one noise level, from one call with both prompts."""
        with torch.autocast(self.device.type, torch.bfloat16):
            both = self.net(
                hidden_states=torch.cat([x, x]).bfloat16(),
                timestep=1000 * sigma.expand(2 * len(x)),
                encoder_hidden_states=self.words,
                pooled_projections=self.pooled,
                return_dict=False,
            )[0]
        conditional, unconditional = both.float().chunk(2)
        return unconditional + GUIDANCE * (conditional - unconditional)

    def step(self, i: int, x: Tensor, action: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The next sample, drawn unless given, and the log-probability of each: [B]."""
        sigma, length = self.sigmas[i], self.sigmas[i + 1] - self.sigmas[i]
        below_one = self.sigmas[1] if i == 0 else sigma
        std = NOISE_LEVEL * (sigma / (1 - below_one)).sqrt()
        velocity = self.velocity(x, sigma)
        drift = std**2 / (2 * sigma)
        mean = x * (1 + drift * length) + velocity * (1 + drift * (1 - sigma)) * length
        noise_std = std * (-length).sqrt()
        if action is None:
            action = mean + noise_std * torch.randn_like(mean)
        log_prob = -((action.detach() - mean) ** 2) / (2 * noise_std**2) - noise_std.log() - 0.9189385
        return action, log_prob.flatten(1).mean(1)

    @torch.no_grad()
    def sample(self, steps: int) -> tuple[Tensor, list[tuple[Tensor, Tensor, Tensor]]]:
        """Clean latents, and the state, the action and its log-probability at each stochastic step."""
        x = torch.randn(self.group, LATENT_CHANNELS, self.side, self.side, device=self.device)
        trajectory = []
        for i in range(steps):
            if i == self.steps - 1:  # the step onto the clean sample adds no noise
                return x + (self.sigmas[i + 1] - self.sigmas[i]) * self.velocity(x, self.sigmas[i]), trajectory
            action, log_prob = self.step(i, x)
            trajectory.append((x, action, log_prob))
            x = action
        return x, trajectory

    @torch.no_grad()
    def score(self, latents: Tensor) -> Tensor:
        """CLIP score of each decoded image with a prompt: [B]."""
        pixels = self.vae.decode((latents / self.scaling + self.shift).bfloat16(), return_dict=False)[0]
        pixels = (pixels.float() / 2 + 0.5).clamp(0, 1)
        resized = F.interpolate(pixels, (224, 224), mode="bicubic", antialias=True)
        mean, std = (torch.tensor(x, device=self.device).view(1, 3, 1, 1) for x in (MEAN, STD))
        images = self.clip.get_image_features(pixel_values=((resized - mean) / std).bfloat16()).pooler_output
        words = torch.randint(1, 400, (len(pixels), 77), device=self.device)
        texts = self.clip.get_text_features(input_ids=words).pooler_output
        return F.cosine_similarity(images.float(), texts.float())

    def train_prompt(self, steps: int) -> None:
        """Sample a group, score it, back-propagate one timestep after the other, and update."""
        with self.phase("rollout"):
            latents, trajectory = self.sample(steps)
        with self.phase("reward"):
            reward = self.score(latents)
            advantage = (reward - reward.mean()) / (reward.std(correction=0) + 1e-4)
            advantage = advantage.clamp(-ADVANTAGE_CLIP, ADVANTAGE_CLIP)
        with self.phase("network with gradient"):
            # cuDNN attention is not safe in backward passes (see plain_srpo).
            torch.backends.cuda.enable_cudnn_sdp(False)
            for i, (x, action, old_log_prob) in enumerate(trajectory):
                ratio = (self.step(i, x, action)[1] - old_log_prob).exp()
                clipped = ratio.clamp(1 - CLIP_RANGE, 1 + CLIP_RANGE)
                loss = -torch.minimum(ratio * advantage, clipped * advantage).mean()
                (loss / len(trajectory)).backward()
            torch.backends.cuda.enable_cudnn_sdp(True)
        with self.phase("optimizer"):
            nn.utils.clip_grad_norm_(self.trained, 0.1)
            self.optimizer.step()
            self.optimizer.zero_grad()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add the time of the block to a phase."""
        start = self.now()
        yield
        self.seconds[name] += self.now() - start

    def now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()


def measure(device: torch.device, tiny: bool, log: Callable[[str], None]) -> dict[str, Any]:
    """Measure the minimal time per prompt, which is a group of samples and one update."""
    trainer = FlowGrpoTrainer(device, tiny)
    log("built")
    trainer.train_prompt(2)
    trainer.seconds.clear()
    times = []
    for _ in range(3):
        start = trainer.now()
        trainer.train_prompt(trainer.steps)
        times.append(trainer.now() - start)
        log(f"one prompt in {times[-1]:.3f} s")
    peak = torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else 0.0
    shares = {name: value / sum(trainer.seconds.values()) for name, value in sorted(trainer.seconds.items())}
    parts = ", ".join(f"{name} {share:.1%}" for name, share in shares.items())
    log(f"{min(times):.3f} s per prompt, {peak:.1f} GiB; {parts}")
    batch = f"1 prompt, {trainer.group} samples, one timestep at a time"
    return {"batch": batch, "seconds per prompt": min(times), "peak GiB": peak, "shares": shares}
