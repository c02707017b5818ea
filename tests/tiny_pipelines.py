"""Tiny pipelines in diffusers' layout: tokenizers that need no download, and sampling from the pipeline's own noise."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tastemaker.core.policy import Backbone
from tastemaker.core.randomness import Randomness
from tastemaker.processes.gaussian import GaussianProcess
from tastemaker.verification.tiny_pipelines import CLIP_TOKENS as CLIP_TOKENS
from tastemaker.verification.tiny_pipelines import T5_VOCAB_SIZE as T5_VOCAB_SIZE
from tastemaker.verification.tiny_pipelines import byte_clip_tokenizer as byte_clip_tokenizer
from tastemaker.verification.tiny_pipelines import byte_t5_tokenizer as byte_t5_tokenizer
from tastemaker.verification.tiny_pipelines import random_network as random_network


def make_flux_pipeline(*, distilled: bool) -> Any:
    """A small random FLUX, as diffusers' pipeline: dev (`distilled`) or schnell."""
    from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler, FluxPipeline, FluxTransformer2DModel
    from transformers import CLIPTextConfig, CLIPTextModel, T5Config, T5EncoderModel

    from tastemaker.models.flux import TINY_CONFIGS

    settings = {**TINY_CONFIGS["transformer"], "guidance_embeds": distilled}
    return FluxPipeline(
        FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=distilled, shift=3.0 if distilled else 1.0),
        random_network(AutoencoderKL, TINY_CONFIGS["vae"], 1),
        random_network(CLIPTextModel, CLIPTextConfig(**{**TINY_CONFIGS["text_encoder"], **CLIP_TOKENS}), 2),
        byte_clip_tokenizer(),
        random_network(T5EncoderModel, T5Config(**{**TINY_CONFIGS["text_encoder_2"], "vocab_size": T5_VOCAB_SIZE}), 3),
        byte_t5_tokenizer(),
        random_network(FluxTransformer2DModel, settings, 4),
    )


@dataclass(frozen=True)
class FixedNoise:
    """A stand-in for `Randomness` that returns fixed starting noise."""

    noise: Tensor

    def normal(self, name: str, *shape: int) -> Tensor:
        assert name == "start" and self.noise.shape[1:] == shape
        return self.noise


@torch.no_grad()
def sample_latents(model: Backbone, process: GaussianProcess, prompts: list[str], noise: Tensor) -> Tensor:
    """Sample clean latents from the given starting noise: [B, ...]."""
    fixed: Any = FixedNoise(noise)
    rng: Randomness = fixed
    return process.start(model, model.embed(prompts), rng).finish().final
