"""Tiny pipelines in diffusers' layout: tokenizers that need no download, and sampling from the pipeline's own noise."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tastemaker.core.policy import Backbone
from tastemaker.core.randomness import Randomness
from tastemaker.processes.gaussian import GaussianProcess
from tastemaker.rewards.backbones.tokenizers import tiny_clip_tokenizer

# Of `byte_clip_tokenizer`.
CLIP_TOKENS = {
    "vocab_size": 514,
    "bos_token_id": 512,
    "eos_token_id": 513,
    "pad_token_id": 513,
}
T5_VOCAB_SIZE = 128  # of `byte_t5_tokenizer`, rounded up


def byte_clip_tokenizer() -> Any:
    """A CLIP tokenizer whose vocabulary is single bytes."""
    tokenizer = tiny_clip_tokenizer()
    tokenizer.model_max_length = 77
    return tokenizer


def byte_t5_tokenizer() -> Any:
    """A T5 tokenizer whose vocabulary is single characters."""
    from transformers import T5TokenizerFast

    characters = ["<pad>", "</s>", "<unk>", "▁", *map(chr, range(33, 127))]
    tokenizer_class: Any = T5TokenizerFast
    vocab = [(character, -1.0 - 0.01 * index) for index, character in enumerate(characters)]
    return tokenizer_class(vocab=vocab, extra_ids=0)


def random_network(network_class: Any, config: Any, seed: int = 0) -> Any:
    """A network with noise added to every parameter, including those initialized to zero or one."""
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        net = network_class(**config) if isinstance(config, dict) else network_class(config)
        for weights in net.parameters():
            weights.add_(0.05 * torch.randn_like(weights))
    return net.eval()


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
