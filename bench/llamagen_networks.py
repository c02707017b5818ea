"""LlamaGen's transformers with random weights, and requests to sample from them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from device import DEVICE, default_dtype  # beside this file, in no package
from torch import Tensor, nn

from tastemaker.core.distributions import TokenSampler
from tastemaker.core.policy import Guidance
from tastemaker.core.randomness import Randomness
from tastemaker.models.llamagen.model import LlamagenSpec
from tastemaker.models.nets.gpt import GPT, GPTConfig
from tastemaker.models.nets.token_decoder import DecodeRequest


@dataclass(frozen=True)
class LlamagenOptions:
    tiny: bool
    deadline: float  # by time.monotonic()


def gpt_config(size: str, tiny: bool) -> GPTConfig:
    if tiny:
        return replace(LlamagenSpec(weights=None).tiny().network_config(), depth=2)
    return LlamagenSpec(variant=size, weights=None, image_size=384).network_config()  # type: ignore[arg-type]


def build_gpt(config: GPTConfig, dtype: torch.dtype) -> GPT:
    torch.manual_seed(0)
    with default_dtype(dtype), DEVICE:
        net = GPT(config)
    nn.init.normal_(net.output.weight, std=0.05)
    net.rotary_factors = net.rotary_factors.to(DEVICE)
    return net.requires_grad_(False)


def make_request(config: GPTConfig, num_images: int, guidance: Guidance | None, seed: int = 0) -> DecodeRequest:
    labels = torch.arange(num_images, device=DEVICE) % config.vocabulary
    cond = torch.cat([labels, torch.full_like(labels, config.vocabulary)]) if guidance else labels
    rng = Randomness(seed, 0, torch.arange(num_images, device=DEVICE))
    uniform = rng.uniform("token", config.grid_size**2)
    return DecodeRequest(cond, None, uniform, TokenSampler(1.0, min(2000, config.codebook_size)), guidance)


def bytes_per_batch(net: GPT, rows: int) -> float:
    """Bytes that all steps of a batch read: weights, and cached keys and values."""
    config, size = net.config, next(net.parameters()).element_size()
    embeddings = net.tok_embeddings.weight.numel() + sum(p.numel() for p in net.cls_embedding.parameters())
    weights = size * (sum(p.numel() for p in net.parameters()) - embeddings)
    length = config.grid_size**2
    per_position = 2 * size * config.depth * rows * (config.kv_heads or config.heads) * config.head_dim
    positions = range(config.prefix_length, config.prefix_length + length - 1)
    return (length - 1) * weights + per_position * sum(positions)


def decode_all(decoder: Any, length: int) -> Tensor:
    for _ in range(length):
        decoder.decode_next()
    ids: Tensor = decoder.ids
    return ids
