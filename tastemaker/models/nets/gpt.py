"""LlamaGen's transformer, in its published layout: a Llama decoder of picture tokens behind condition tokens."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

KVCache = tuple[tuple[Tensor, Tensor], ...]  # keys and values of each layer: [B, kv heads, places read, head]


@dataclass(frozen=True)
class GPTConfig:
    """Sizes of the network; as given, GPT-B told by a class."""

    width: int = 768
    depth: int = 12
    heads: int = 12
    kv_heads: int | None = None  # as many as heads if not given
    codes: int = 16384
    side: int = 16  # tokens a side
    told: Literal["class", "caption", "words"] = "class"
    prefix: int = 1  # condition tokens
    vocabulary: int = 1000  # classes, or words; of captions the size of their features
    multiple: int = 256  # that the hidden width is rounded up to
    dropout: float = 0.0  # in training, of embedded tokens and of what each half of a block adds

    def __post_init__(self) -> None:
        if self.width % self.heads or self.width // self.heads % 4 or self.heads % (self.kv_heads or 1):
            found = f"width {self.width}, heads {self.heads}, kv_heads {self.kv_heads}"
            raise ValueError(f"found {found}; heads must divide width into multiples of 4, kv_heads divide heads")

    @property
    def head(self) -> int:
        return self.width // self.heads

    @property
    def hidden(self) -> int:
        return math.ceil(int(2 * 4 * self.width / 3) / self.multiple) * self.multiple


def rope_2d(side: int, head: int, prefix: int, still: bool, base: float = 10000.0) -> Tensor:
    """Cosines and sines [2, prefix + side * side, head / 2] of 2-D rotary positions: rows first, then columns.

    Both are 0 for condition tokens, which makes their queries and keys vanish, as published; where they are to stand
    still and be attended to like others, their cosines are 1.
    """
    half = head // 2
    frequencies = base ** (-torch.arange(0, half, 2, device="cpu")[: half // 2].float() / half)
    angles = torch.arange(side, device="cpu")[:, None] * frequencies  # [side, head / 4]
    grid = torch.cat([angles[:, None].expand(-1, side, -1), angles[None].expand(side, -1, -1)], 2).flatten(0, 1)
    cosines = torch.cat([torch.full((prefix, half), float(still), device="cpu"), grid.cos()])
    return torch.stack([cosines, torch.cat([torch.zeros(prefix, half, device="cpu"), grid.sin()])])


def rope_factors(rotations: Tensor) -> Tensor:
    """Factors [2, n, 1, head] for each channel and for its neighbour, of cosines and sines."""
    cosines, sines = rotations
    return torch.stack([cosines.repeat_interleave(2, 1), torch.stack([-sines, sines], 2).flatten(1)])[:, :, None]


def apply_rotary_emb(x: Tensor, factors: Tensor) -> Tensor:
    """Turn pairs of neighbouring channels of [B, n, heads, head], in float32."""
    exact = x.float()
    swapped = exact.reshape(*x.shape[:-1], -1, 2).flip(-1).flatten(-2)
    return torch.addcmul(exact * factors[0], swapped, factors[1]).to(x.dtype)


def training_dropout(x: Tensor, share: float) -> Tensor:
    """Some numbers left out where a gradient is wanted, and only there: what is sampled or scored is left whole."""
    return F.dropout(x, share) if share and torch.is_grad_enabled() else x


class RMSNorm(nn.Module):
    def __init__(self, width: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.eps, self.weight = eps, nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), x.shape[-1:], eps=self.eps).to(x.dtype) * self.weight


class GPTAttention(nn.Module):
    def __init__(self, shape: GPTConfig) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head = shape.heads, shape.kv_heads or shape.heads, shape.head
        self.wqkv = nn.Linear(shape.width, (self.heads + 2 * self.kv_heads) * self.head, bias=False)
        self.wo = nn.Linear(shape.width, shape.width, bias=False)
        self.dropout = shape.dropout

    def forward(
        self, x: Tensor, factors: Tensor, mask: Tensor | None, past: tuple[Tensor, Tensor] | None
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        b, n, _ = x.shape
        both = self.heads + self.kv_heads
        qkv = self.wqkv(x).view(b, n, both + self.kv_heads, self.head)
        turned = apply_rotary_emb(qkv[:, :, :both], factors)
        q, k, v = (part.transpose(1, 2) for part in (*turned.tensor_split([self.heads], 2), qkv[:, :, both:]))
        if past is not None:
            k, v = torch.cat([past[0], k], 2), torch.cat([past[1], v], 2)
        mixed = F.scaled_dot_product_attention(
            q, k, v, mask, is_causal=mask is None and n > 1, enable_gqa=self.heads != self.kv_heads
        )
        out: Tensor = self.wo(mixed.transpose(1, 2).reshape(b, n, -1))
        return training_dropout(out, self.dropout), (k, v)


class FeedForward(nn.Module):
    def __init__(self, shape: GPTConfig) -> None:
        super().__init__()
        self.w1, self.w3 = (nn.Linear(shape.width, shape.hidden, bias=False) for _ in range(2))
        self.w2 = nn.Linear(shape.hidden, shape.width, bias=False)
        self.dropout = shape.dropout

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.w2(F.silu(self.w1(x)) * self.w3(x))
        return training_dropout(out, self.dropout)


class GPTBlock(nn.Module):
    def __init__(self, shape: GPTConfig) -> None:
        super().__init__()
        self.attention, self.feed_forward = GPTAttention(shape), FeedForward(shape)
        self.attention_norm, self.ffn_norm = RMSNorm(shape.width), RMSNorm(shape.width)

    def forward(
        self, x: Tensor, factors: Tensor, mask: Tensor | None, past: tuple[Tensor, Tensor] | None
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        mixed, now = self.attention(self.attention_norm(x), factors, mask, past)
        x = x + mixed
        return x + self.feed_forward(self.ffn_norm(x)), now


class ClassEmbedder(nn.Module):
    """A class [B] as one token; the class after the last stands for none."""

    def __init__(self, shape: GPTConfig) -> None:
        super().__init__()
        self.embedding_table = nn.Embedding(shape.vocabulary + 1, shape.width)

    def forward(self, label: Tensor) -> Tensor:
        out: Tensor = self.embedding_table(label)[:, None]
        return out


class CaptionFeatureEmbedder(nn.Module):
    """A text encoder's features [B, prefix, features]; `uncond_embedding`, which is never trained, stands for none."""

    def __init__(self, shape: GPTConfig) -> None:
        super().__init__()
        self.cap_proj = nn.ModuleDict(
            {
                "fc1": nn.Linear(shape.vocabulary, shape.width, bias=False),
                "fc2": nn.Linear(shape.width, shape.width, bias=False),
            }
        )
        self.uncond_embedding: Tensor
        self.register_buffer("uncond_embedding", torch.randn(shape.prefix, shape.vocabulary) / shape.vocabulary**0.5)

    def forward(self, features: Tensor) -> Tensor:
        out: Tensor = self.cap_proj["fc2"](F.gelu(self.cap_proj["fc1"](features), approximate="tanh"))
        return out


class WordEmbedder(nn.Module):
    """A caption's words [B, prefix], each with its place, for their order matters."""

    def __init__(self, shape: GPTConfig) -> None:
        super().__init__()
        self.embedding_table = nn.Embedding(shape.vocabulary, shape.width)
        self.places = nn.Embedding(shape.prefix, shape.width)

    def forward(self, words: Tensor) -> Tensor:
        out: Tensor = self.embedding_table(words) + self.places.weight
        return out


CONDITION_EMBEDDERS: dict[str, type[ClassEmbedder | CaptionFeatureEmbedder | WordEmbedder]] = {
    "class": ClassEmbedder,
    "caption": CaptionFeatureEmbedder,
    "words": WordEmbedder,
}


class GPT(nn.Module):
    """Reads the condition, then tokens; with a cache, only those not read before."""

    entries = ("states",)

    def __init__(self, shape: GPTConfig) -> None:
        super().__init__()
        self.shape = shape
        self.cls_embedding = CONDITION_EMBEDDERS[shape.told](shape)
        self.tok_embeddings = nn.Embedding(shape.codes, shape.width)
        self.layers = nn.ModuleList(GPTBlock(shape) for _ in range(shape.depth))
        self.norm, self.output = RMSNorm(shape.width), nn.Linear(shape.width, shape.codes, bias=False)
        # No buffer: casting the network must not round it, nor making the network on no device lose it.
        self.factors = rope_factors(rope_2d(shape.side, shape.head, shape.prefix, still=shape.told == "words"))
        self.apply(_initialize)
        nn.init.zeros_(self.output.weight)

    def forward(
        self, ids: Tensor | None, cond: Tensor | None, cache: KVCache | None = None, shown: Tensor | None = None
    ) -> tuple[Tensor, KVCache]:
        """Logits [B, n, codes] after the last condition token and after each of `ids` [B, n - 1], and the cache.

        An empty cache is filled, none is left empty; `shown` [B, prefix] says which condition tokens are no padding.
        """
        h, now = self.states(ids, cond, cache, shown)
        return self.output(h).float(), now

    def states(
        self, ids: Tensor | None, cond: Tensor | None, cache: KVCache | None = None, shown: Tensor | None = None
    ) -> tuple[Tensor, KVCache]:
        """What the logits are made of: [B, n, width]."""
        parts = [self.cls_embedding(cond)] if cond is not None else []
        parts += [self.tok_embeddings(ids)] if ids is not None else []
        h = training_dropout(torch.cat(parts, 1) if len(parts) > 1 else parts[0], self.shape.dropout)
        read = cache[0][0].shape[2] if cache else 0
        if self.factors.device != h.device:
            self.factors = self.factors.to(h.device)
        factors = self.factors[:, read : read + h.shape[1]]
        mask = None if shown is None else padded_causal_mask(shown, read, h.shape[1])
        now: KVCache = ()
        for i, layer in enumerate(self.layers):
            h, kept = layer(h, factors, mask, cache[i] if cache else None)
            now += () if cache is None else (kept,)
        if cond is not None:
            h = h[:, self.shape.prefix - 1 :]
        return self.norm(h), now


def padded_causal_mask(shown: Tensor, read: int, new: int) -> Tensor:
    """What each new place attends to: itself and all before it that is not padding: [B, 1, new, read + new] bool."""
    causal = torch.ones(new, read + new, dtype=torch.bool, device=shown.device).tril(read)
    itself = torch.eye(new, read + new, dtype=torch.bool, device=shown.device).roll(read, 1)
    padded = F.pad(shown, (0, max(read + new - shown.shape[1], 0)), value=True)[:, None, None]
    return (causal & padded) | itself


def _initialize(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
