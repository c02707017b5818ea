"""Decode the tokens of LlamaGen's transformer with a preallocated KV cache, the two halves of guidance in one batch.

Lower bound of a decoding step: it reads every weight except the embedding tables, and the keys and values of all
previous positions. In bfloat16 that is 2 (P - D (V + C)) + 4 depth rows kv_heads head_dim positions bytes. For 8 guided
images of 576 tokens the average is 0.36, 1.1, 2.4, 4.1 and 7.5 GB for B, L, XL, XXL and 3B, which takes 0.05, 0.15,
0.31, 0.55 and 1.0 s per batch at 4.3 TB/s.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property
from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...core.distributions import TokenSampler
from ...core.guidance import apply_guidance, count_guided_tokens, in_interval, token_levels
from ...core.policy import Guidance
from .gpt import GPT, GPTAttention, GPTBlock, GPTConfig, KVCache, apply_rotary_emb, padded_causal_mask


@dataclass(frozen=True)
class DecodeRequest:
    """A batch of B sequences to decode.

    The network reads R rows: R = B without guidance; with guidance R = 2 B, conditional rows first.
    """

    cond: Tensor  # [R, ...] input of the network's condition embedder
    prefix_mask: Tensor | None  # [R, prefix] bool, False at padding
    uniform: Tensor  # [B, L] the random number that decides each token
    sampler: TokenSampler
    guidance: Guidance | None

    @cached_property
    def num_guided_tokens(self) -> int:
        """Number of leading tokens for which the unconditional rows have to be read."""
        return count_guided_tokens(self.guidance, self.uniform.shape[1]) if self.guidance else 0

    @cached_property
    def guided_tokens(self) -> list[bool]:
        """Whether guidance applies, for each of the L tokens."""
        length = self.uniform.shape[1]
        if self.guidance is None:
            return [False] * length
        return in_interval(token_levels(length), self.guidance.interval).tolist()

    def apply_guidance(self, logits: Tensor, index: int) -> Tensor:
        """Logits [B, V] to sample token `index` from, given the logits [R, V] or [B, V] of the rows."""
        if not self.guided_tokens[index]:
            return logits[: len(self.uniform)]
        return self.extrapolate(logits, torch.full((1,), index, device=logits.device))

    def extrapolate(self, logits: Tensor, index: Tensor) -> Tensor:
        """Guided logits [B, V] from those of both halves [2 B, V], for the token `index` [1]."""
        assert self.guidance is not None
        conditional, unconditional = logits.chunk(2)
        return apply_guidance(self.guidance, conditional, unconditional, 1 - index / self.uniform.shape[1])

    def select(self, indices: Tensor) -> DecodeRequest:
        """The request of some of the B sequences."""
        rows = with_unconditional(indices, len(self.uniform), len(self.cond))
        mask = None if self.prefix_mask is None else self.prefix_mask[rows]
        return DecodeRequest(self.cond[rows], mask, self.uniform[indices], self.sampler, self.guidance)


def transformer_blocks(net: GPT) -> list[GPTBlock]:
    """The layers of the network, with their type."""
    return [block for block in net.layers if isinstance(block, GPTBlock)]


def with_unconditional(indices: Tensor, count: int, rows: int) -> Tensor:
    """Row indices of some of `count` sequences; if there are more rows than sequences, their unconditional rows too."""
    return torch.cat([indices, indices + count]) if rows > count else indices


def to_indices(selection: Tensor, count: int, device: torch.device) -> Tensor:
    """Indices of a selection of `count` sequences, given as indices or as a boolean mask."""
    return torch.arange(count, device=selection.device)[selection].to(device)


def prefill(net: nn.Module, request: DecodeRequest) -> tuple[Tensor, KVCache, Tensor]:
    """Read the conditions: logits [R, V] of the first token, the KV cache of distinct rows, and each row's index in it.

    Equal neighbors are read once: the samples of a group share their prompt, and all unconditional rows are the same.
    """
    cond, mask = request.cond, request.prefix_mask
    distinct = torch.ones(len(cond), dtype=torch.bool, device=cond.device)
    for x in (cond, mask):
        if x is not None and len(x) > 1:
            changed = (x[1:] != x[:-1]).flatten(1).any(1) if x.ndim > 1 else x[1:] != x[:-1]
            distinct[1:] = changed if x is cond else distinct[1:] | changed
    rows, index = distinct.nonzero().flatten(), distinct.cumsum(0) - 1
    logits, cache = net(None, cond[rows], (), None if mask is None else mask[rows])
    return logits[index, -1], cache, index


def allocate_kv_cache(config: GPTConfig, rows: int, like: Tensor, stride: int) -> Tensor:
    """An empty cache [depth, 2, rows, kv heads, positions, stride], where stride is at least the head dimension."""
    positions = config.prefix_length + config.grid_size**2
    return like.new_zeros(config.depth, 2, rows, config.kv_heads or config.heads, positions, stride)


def fill_kv_cache(cache: Tensor, prefilled: KVCache, index: Tensor) -> None:
    """Copy the prefilled keys and values of each row into the static cache."""
    for layer, (keys, values) in zip(cache, prefilled, strict=True):
        length, head_dim = keys.shape[2:]
        layer[0, :, :, :length, :head_dim], layer[1, :, :, :length, :head_dim] = keys[index], values[index]


class CachedTokenDecoder(ABC):
    """Token decoder with a preallocated KV cache: prompts are read once, then one token of every row per call."""

    low_precision = False

    @torch.no_grad()
    def __init__(self, net: nn.Module, request: DecodeRequest) -> None:
        self.net, self.request, self.num_decoded = net, request, 0
        self.logits, prefilled, index = prefill(net, request)
        self.prefix_length = prefilled[0][0].shape[2]
        self.cache = self.allocate_cache(len(request.cond), prefilled[0][1])
        fill_kv_cache(self.cache, prefilled, index)
        self._ids = torch.zeros_like(request.uniform, dtype=torch.long)
        self._log_prob = torch.zeros_like(request.uniform)
        self.last = self._ids[:, 0]  # the next input of the network, once the first token is decoded

    @abstractmethod
    def allocate_cache(self, rows: int, like: Tensor) -> Tensor:
        """An empty cache [depth, 2, rows, kv heads, positions, head dim] of the dtype of `like`."""

    @abstractmethod
    def read_token(self, ids: Tensor, position: int) -> Tensor:
        """Logits [R, V] after reading tokens [R] at `position`; their keys and values are written into the cache."""

    @property
    def ids(self) -> Tensor:
        return self._ids.clone()

    @property
    def log_prob(self) -> Tensor:
        return self._log_prob.clone()

    @torch.no_grad()
    def decode_next(self) -> None:
        request, i = self.request, self.num_decoded
        if i:
            inputs = torch.cat([self.last, self.last]) if i < request.num_guided_tokens else self.last
            self.logits = self.read_token(inputs, self.prefix_length + i - 1)
        logits = request.apply_guidance(self.logits, i)
        self.last, self._log_prob[:, i] = request.sampler.sample(logits, request.uniform[:, i])
        self._ids[:, i], self.num_decoded = self.last, i + 1

    def replace_last(self, ids: Tensor) -> None:
        self.last = ids

    def select(self, rows: Tensor) -> Self:
        count = len(self.request.uniform)
        indices = to_indices(rows, count, self.request.uniform.device)
        self.logits = self.logits[with_unconditional(indices, count, len(self.logits))]
        self.cache = self.cache[:, :, with_unconditional(indices, count, self.cache.shape[2])]
        self.request = self.request.select(indices)
        self._ids, self._log_prob, self.last = self._ids[indices], self._log_prob[indices], self.last[indices]
        return self


class StaticKVCacheDecoder(CachedTokenDecoder):
    """Decoder of LlamaGen's transformer that calls the network's own modules, on any device."""

    net: GPT

    def allocate_cache(self, rows: int, like: Tensor) -> Tensor:
        return allocate_kv_cache(self.net.config, rows, like, self.net.config.head_dim)

    def read_token(self, ids: Tensor, position: int) -> Tensor:
        return decode_step(self.net, ids, self.request.prefix_mask, self.cache, position)


def decode_step(net: GPT, ids: Tensor, prefix_mask: Tensor | None, cache: Tensor, position: int) -> Tensor:
    """Logits [R, V] after reading tokens [R] at `position`; their keys and values are written into the cache."""
    h: Tensor = net.tok_embeddings(ids[:, None])
    factors = net.rotary_factors[:, position : position + 1]
    mask = None if prefix_mask is None else padded_causal_mask(prefix_mask[: len(ids)], position, 1)
    for layer, layer_cache in zip(transformer_blocks(net), cache, strict=True):
        h = h + attend_with_cache(layer.attention, layer.attention_norm(h), factors, mask, layer_cache, position)
        h = h + layer.feed_forward(layer.ffn_norm(h))
    logits: Tensor = net.output(net.norm(h))
    return logits[:, 0].float()


def attend_with_cache(
    attention: GPTAttention, x: Tensor, factors: Tensor, mask: Tensor | None, cache: Tensor, position: int
) -> Tensor:
    """Output of an attention layer for one new position [R, 1, D], with a cache [2, rows, kv heads, positions, d]."""
    rows, num_rotary = len(x), attention.heads + attention.kv_heads
    qkv = attention.wqkv(x).view(rows, 1, num_rotary + attention.kv_heads, attention.head)
    rotated = apply_rotary_emb(qkv[:, :, :num_rotary], factors)
    q, k, v = (part.transpose(1, 2) for part in (*rotated.tensor_split([attention.heads], 2), qkv[:, :, num_rotary:]))
    visible = cache[:, :rows, :, : position + 1]
    visible[0, :, :, -1:], visible[1, :, :, -1:] = k, v
    grouped = attention.heads != attention.kv_heads
    mixed = F.scaled_dot_product_attention(q, visible[0], visible[1], mask, enable_gqa=grouped)
    out: Tensor = attention.wo(mixed.transpose(1, 2).reshape(rows, 1, -1))
    return out
