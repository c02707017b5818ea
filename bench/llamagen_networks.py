"""LlamaGen's transformers at random weights, and what they are asked to write."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from device import DEVICE  # beside this file, in no package
from torch import Tensor, nn

from tastemaker.core.distributions import TokenSampler
from tastemaker.core.policy import Guidance
from tastemaker.core.randomness import Randomness
from tastemaker.models.llamagen.model import Llamagen
from tastemaker.models.nets.gpt import GPT, GPTConfig
from tastemaker.models.nets.token_decoder import DecodeRequest


@dataclass(frozen=True)
class Options:
    tiny: bool
    deadline: float  # of time.monotonic()


def shaped(size: str, tiny: bool) -> GPTConfig:
    if tiny:
        return replace(Llamagen(weights=None).tiny().sizes(), depth=2)
    return Llamagen(size=size, weights=None, pixels=384).sizes()  # type: ignore[arg-type]


def network(shape: GPTConfig, dtype: torch.dtype) -> GPT:
    before = torch.get_default_dtype()
    torch.manual_seed(0)
    torch.set_default_dtype(dtype)
    with torch.device(DEVICE):
        net = GPT(shape)
    torch.set_default_dtype(before)
    nn.init.normal_(net.output.weight, std=0.05)
    net.factors = net.factors.to(DEVICE)
    return net.requires_grad_(False)


def ordered(shape: GPTConfig, images: int, guidance: Guidance | None, seed: int = 0) -> DecodeRequest:
    labels = torch.arange(images, device=DEVICE) % shape.vocabulary
    cond = torch.cat([labels, torch.full_like(labels, shape.vocabulary)]) if guidance else labels
    uniform = Randomness(seed, 0, torch.arange(images, device=DEVICE)).uniform("token", shape.side**2)
    return DecodeRequest(cond, None, uniform, TokenSampler(1.0, min(2000, shape.codes)), guidance)


def moved(net: GPT, rows: int) -> float:
    """Bytes of all steps of a batch: weights, and what was read."""
    shape, size = net.shape, next(net.parameters()).element_size()
    tables = net.tok_embeddings.weight.numel() + sum(p.numel() for p in net.cls_embedding.parameters())
    weights = size * (sum(p.numel() for p in net.parameters()) - tables)
    length = shape.side**2
    place = 2 * size * shape.depth * rows * (shape.kv_heads or shape.heads) * shape.head
    return (length - 1) * weights + place * sum(range(shape.prefix, shape.prefix + length - 1))


def finish(scribe: Any, length: int) -> Tensor:
    for _ in range(length):
        scribe.write()
    ids: Tensor = scribe.ids
    return ids
