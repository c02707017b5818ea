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

CLIP_ENDS = {"vocab_size": 514, "bos_token_id": 512, "eos_token_id": 513, "pad_token_id": 513}  # its tokenizer's
T5_WORDS = 128  # that `t5_words` knows


def byte_clip_tokenizer() -> Any:
    """A CLIP tokenizer that knows single bytes."""
    words = tiny_clip_tokenizer()
    words.model_max_length = 77
    return words


def byte_t5_tokenizer() -> Any:
    """A T5 tokenizer that knows single letters."""
    from transformers import T5TokenizerFast

    signs = ["<pad>", "</s>", "<unk>", "▁", *map(chr, range(33, 127))]
    kind: Any = T5TokenizerFast
    return kind(vocab=[(sign, -1.0 - 0.01 * place) for place, sign in enumerate(signs)], extra_ids=0)


def random(kind: Any, config: Any, seed: int = 0) -> Any:
    """A network whose every tensor is random, those that begin at nought or one as well."""
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        net = kind(**config) if isinstance(config, dict) else kind(config)
        for weights in net.parameters():
            weights.add_(0.05 * torch.randn_like(weights))
    return net.eval()


@dataclass(frozen=True)
class FixedNoise:
    """Randomness that starts from given noise."""

    noise: Tensor

    def normal(self, name: str, *shape: int) -> Tensor:
        assert name == "start" and self.noise.shape[1:] == shape
        return self.noise


@torch.no_grad()
def sample_latents(model: Backbone, process: GaussianProcess, prompts: list[str], noise: Tensor) -> Tensor:
    """Clean latents made of that noise: [B, ...]."""
    given: Any = FixedNoise(noise)
    rng: Randomness = given
    return process.start(model, model.embed(prompts), rng).finish().final
