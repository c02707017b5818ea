"""LlamaGen's transformer in its published layout: a Llama decoder over condition tokens, then image tokens."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...core.distributions import MAX_CHUNK_LOGITS
from ...core.quantization import TokenNetwork

KVCache = tuple[tuple[Tensor, Tensor], ...]  # keys and values of each layer: [B, kv heads, positions, head]


@dataclass(frozen=True)
class GPTConfig:
    """Sizes of the network; the defaults are GPT-B with class conditioning."""

    width: int = 768
    depth: int = 12
    heads: int = 12
    kv_heads: int | None = None  # heads of keys and values; None: as many as `heads`
    codebook_size: int = 16384
    grid_size: int = 16  # tokens per side
    conditioning: Literal["class", "caption", "words"] = "class"
    prefix_length: int = 1  # number of condition tokens
    vocabulary: int = 1000  # number of classes or of words; for captions the feature size of the text encoder
    multiple_of: int = 256  # the intermediate size is rounded up to a multiple of this
    dropout: float = 0.0  # in training, on embeddings and on the output of each half of a block

    def __post_init__(self) -> None:
        if self.width % self.heads or self.width // self.heads % 4 or self.heads % (self.kv_heads or 1):
            sizes = f"width {self.width}, heads {self.heads}, kv_heads {self.kv_heads}"
            raise ValueError(
                f"found {sizes}; choose heads so that width / heads is a multiple of 4, and kv_heads so that it "
                "divides heads [TM480]"
            )

    @property
    def head_dim(self) -> int:
        return self.width // self.heads

    @property
    def intermediate_size(self) -> int:
        return math.ceil(int(2 * 4 * self.width / 3) / self.multiple_of) * self.multiple_of


def rope_2d(side: int, head_dim: int, prefix: int, identity_prefix: bool, base: float = 10000.0) -> Tensor:
    """Cosines and sines [2, prefix + side * side, head_dim / 2] of 2-D rotary positions: rows first, then columns.

    In published networks both are 0 for condition tokens, which makes their queries and keys zero. With
    `identity_prefix` their cosines are 1: condition tokens are not rotated and are attended to like others.
    """
    half = head_dim // 2
    frequencies = base ** (-torch.arange(0, half, 2, device="cpu")[: half // 2].float() / half)
    angles = torch.arange(side, device="cpu")[:, None] * frequencies  # [side, head_dim / 4]
    grid = torch.cat([angles[:, None].expand(-1, side, -1), angles[None].expand(side, -1, -1)], 2).flatten(0, 1)
    cosines = torch.cat([torch.full((prefix, half), float(identity_prefix), device="cpu"), grid.cos()])
    return torch.stack([cosines, torch.cat([torch.zeros(prefix, half, device="cpu"), grid.sin()])])


def rope_factors(rotations: Tensor) -> Tensor:
    """Factors [2, n, 1, head] of each channel and of its neighbor, from cosines and sines [2, n, head / 2]."""
    cosines, sines = rotations
    return torch.stack([cosines.repeat_interleave(2, 1), torch.stack([-sines, sines], 2).flatten(1)])[:, :, None]


def apply_rotary_emb(x: Tensor, factors: Tensor) -> Tensor:
    """Rotate pairs of neighboring channels of [B, n, heads, head], in float32."""
    exact = x.float()
    swapped = exact.reshape(*x.shape[:-1], -1, 2).flip(-1).flatten(-2)
    return torch.addcmul(exact * factors[0], swapped, factors[1]).to(x.dtype)


def training_dropout(x: Tensor, p: float) -> Tensor:
    """Apply dropout where gradients are enabled; sampling and scoring see the full network."""
    return F.dropout(x, p) if p and torch.is_grad_enabled() else x


class RMSNorm(nn.Module):
    def __init__(self, width: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.eps, self.weight = eps, nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), x.shape[-1:], eps=self.eps).to(x.dtype) * self.weight


class GPTAttention(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head = config.heads, config.kv_heads or config.heads, config.head_dim
        self.wqkv = nn.Linear(config.width, (self.heads + 2 * self.kv_heads) * self.head, bias=False)
        self.wo = nn.Linear(config.width, config.width, bias=False)
        self.dropout = config.dropout

    def forward(
        self, x: Tensor, factors: Tensor, mask: Tensor | None, past: tuple[Tensor, Tensor] | None
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        b, n, _ = x.shape
        num_rotary = self.heads + self.kv_heads
        qkv = self.wqkv(x).view(b, n, num_rotary + self.kv_heads, self.head)
        rotated = apply_rotary_emb(qkv[:, :, :num_rotary], factors)
        q, k, v = (part.transpose(1, 2) for part in (*rotated.tensor_split([self.heads], 2), qkv[:, :, num_rotary:]))
        if past is not None:
            k, v = torch.cat([past[0], k], 2), torch.cat([past[1], v], 2)
        mixed = F.scaled_dot_product_attention(
            q, k, v, mask, is_causal=mask is None and n > 1, enable_gqa=self.heads != self.kv_heads
        )
        out: Tensor = self.wo(mixed.transpose(1, 2).reshape(b, n, -1))
        return training_dropout(out, self.dropout), (k, v)


class FeedForward(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.w1, self.w3 = (nn.Linear(config.width, config.intermediate_size, bias=False) for _ in range(2))
        self.w2 = nn.Linear(config.intermediate_size, config.width, bias=False)
        self.dropout = config.dropout

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.w2(F.silu(self.w1(x)) * self.w3(x))
        return training_dropout(out, self.dropout)


class GPTBlock(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.attention, self.feed_forward = GPTAttention(config), FeedForward(config)
        self.attention_norm, self.ffn_norm = RMSNorm(config.width), RMSNorm(config.width)

    def forward(
        self, x: Tensor, factors: Tensor, mask: Tensor | None, past: tuple[Tensor, Tensor] | None
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        mixed, cache = self.attention(self.attention_norm(x), factors, mask, past)
        x = x + mixed
        return x + self.feed_forward(self.ffn_norm(x)), cache


class ClassEmbedder(nn.Module):
    """One token per class label [B]; the label after the last class is the unconditional one."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.embedding_table = nn.Embedding(config.vocabulary + 1, config.width)

    def forward(self, label: Tensor) -> Tensor:
        out: Tensor = self.embedding_table(label)[:, None]
        return out


class CaptionFeatureEmbedder(nn.Module):
    """Projects text features [B, prefix, F]; `uncond_embedding`, which is never trained, is the empty caption."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.cap_proj = nn.ModuleDict(
            {
                "fc1": nn.Linear(config.vocabulary, config.width, bias=False),
                "fc2": nn.Linear(config.width, config.width, bias=False),
            }
        )
        self.uncond_embedding: Tensor
        self.register_buffer(
            "uncond_embedding", torch.randn(config.prefix_length, config.vocabulary) / config.vocabulary**0.5
        )

    def forward(self, features: Tensor) -> Tensor:
        out: Tensor = self.cap_proj["fc2"](F.gelu(self.cap_proj["fc1"](features), approximate="tanh"))
        return out


class WordEmbedder(nn.Module):
    """Embeds word ids [B, prefix] and adds learned positions."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.embedding_table = nn.Embedding(config.vocabulary, config.width)
        self.places = nn.Embedding(config.prefix_length, config.width)

    def forward(self, words: Tensor) -> Tensor:
        out: Tensor = self.embedding_table(words) + self.places.weight
        return out


CONDITION_EMBEDDERS: dict[str, type[ClassEmbedder | CaptionFeatureEmbedder | WordEmbedder]] = {
    "class": ClassEmbedder,
    "caption": CaptionFeatureEmbedder,
    "words": WordEmbedder,
}


class GPT(TokenNetwork):
    """Autoregressive transformer: condition tokens, then image tokens; with a cache only new tokens are read."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.cls_embedding = CONDITION_EMBEDDERS[config.conditioning](config)
        self.tok_embeddings = nn.Embedding(config.codebook_size, config.width)
        self.layers = nn.ModuleList(GPTBlock(config) for _ in range(config.depth))
        self.norm, self.output = RMSNorm(config.width), nn.Linear(config.width, config.codebook_size, bias=False)
        # Not a buffer: casting the network must not round it, and building on the meta device must not lose it.
        identity_prefix = config.conditioning == "words"
        self.rotary_factors = rope_factors(
            rope_2d(config.grid_size, config.head_dim, config.prefix_length, identity_prefix)
        )
        self.apply(_initialize)
        nn.init.zeros_(self.output.weight)

    def forward(
        self, ids: Tensor | None, cond: Tensor | None, cache: KVCache | None = None, prefix_mask: Tensor | None = None
    ) -> tuple[Tensor, KVCache]:
        """Logits [B, n, V] after the last condition token and after each of `ids` [B, n - 1], and the new KV cache.

        Pass an empty cache to have one filled, or None to have none. `prefix_mask` [B, prefix] is False at padding.
        """
        h, new_cache = self.hidden_states(ids, cond, cache, prefix_mask)
        return self.output(h).float(), new_cache

    def hidden_states(
        self, ids: Tensor | None, cond: Tensor | None, cache: KVCache | None = None, prefix_mask: Tensor | None = None
    ) -> tuple[Tensor, KVCache]:
        """Normalized hidden states [B, n, width], which `output` maps to logits, and the new KV cache."""
        parts = [self.cls_embedding(cond)] if cond is not None else []
        parts += [self.tok_embeddings(ids)] if ids is not None else []
        h = training_dropout(torch.cat(parts, 1) if len(parts) > 1 else parts[0], self.config.dropout)
        start = cache[0][0].shape[2] if cache else 0
        if self.rotary_factors.device != h.device:
            self.rotary_factors = self.rotary_factors.to(h.device)
        factors = self.rotary_factors[:, start : start + h.shape[1]]
        mask = None if prefix_mask is None else padded_causal_mask(prefix_mask, start, h.shape[1])
        new_cache: KVCache = ()
        for i, layer in enumerate(self.layers):
            h, layer_cache = layer(h, factors, mask, cache[i] if cache else None)
            new_cache += () if cache is None else (layer_cache,)
        if cond is not None:
            h = h[:, self.config.prefix_length - 1 :]
        return self.norm(h), new_cache


def padded_causal_mask(prefix_mask: Tensor, start: int, new: int) -> Tensor:
    """Attention mask [B, 1, new, start + new] of new positions: each sees itself and all before it but padding."""
    total, device = start + new, prefix_mask.device
    causal = torch.ones(new, total, dtype=torch.bool, device=device).tril(start)
    itself = torch.eye(new, total, dtype=torch.bool, device=device).roll(start, 1)
    padded = F.pad(prefix_mask, (0, max(total - prefix_mask.shape[1], 0)), value=True)[:, None, None]
    return (causal & padded) | itself


def hidden_states_and_head(
    net: nn.Module, ids: Tensor, cond: Tensor, prefix_mask: Tensor | None = None
) -> tuple[Tensor, Tensor] | None:
    """Hidden states and output matrix of sequences [B, K], for log-probabilities in chunks.

    None if the logits are few enough to compute at once, or if the network is sharded and only full calls gather it.
    """
    if not isinstance(net, GPT) or type(net.output) is not nn.Linear or is_sharded(net):
        return None
    if ids.numel() * net.config.codebook_size <= MAX_CHUNK_LOGITS:
        return None
    states, _ = net.hidden_states(ids[:, :-1], cond, None, prefix_mask)
    dtype, weight = compute_dtype(net, states.device), net.output.weight
    # Without a gradient the live weights may be a snapshot's, which is swapped out again before the matrix is used.
    return states.to(dtype), weight.to(dtype) if torch.is_grad_enabled() else weight.detach().to(dtype, copy=True)


def is_sharded(net: nn.Module) -> bool:
    """Whether FSDP or another wrapper holds the parameters as tensors of its own class."""
    return any(type(p.data) is not Tensor for p in net.parameters())


def compute_dtype(net: GPT, device: torch.device) -> torch.dtype:
    """The dtype of matrix products, under autocast that of autocast."""
    if torch.is_autocast_enabled(device.type):
        return torch.get_autocast_dtype(device.type)
    return next(net.output.parameters()).dtype


def _initialize(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
