"""Janus-Pro's image generator: transformers' Llama between embeddings of image tokens and a head over the codebook.

Parameters have the names of `JanusForConditionalGeneration`, whose other parts (vision encoder, text head, image
tokenizer) take no part in generation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .gpt import KVCache, padded_causal_mask
from .token_decoder import CachedTokenDecoder, DecodeRequest
from .vq import VQConfig


@dataclass(frozen=True)
class JanusSizes:
    """Sizes of the language model and of the image side; the defaults are those of Janus-Pro-1B."""

    width: int = 2048
    depth: int = 24
    heads: int = 16
    kv_heads: int = 16
    intermediate_size: int = 5632
    text_vocab_size: int = 102400
    max_positions: int = 16384
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    head_width: int = 2048  # of the head over the codebook
    aligner_layers: int = 2
    grid_size: int = 24  # tokens per side
    prefix_length: int = 128  # most text tokens of a prompt
    vq: VQConfig = VQConfig()

    @property
    def head_dim(self) -> int:
        return self.width // self.heads

    @property
    def image_size(self) -> int:
        """Pixels per side."""
        return self.grid_size * self.vq.stride

    def text_config(self) -> Any:
        """Settings of the language model for transformers."""
        from transformers import LlamaConfig

        return LlamaConfig(
            vocab_size=self.text_vocab_size,
            hidden_size=self.width,
            intermediate_size=self.intermediate_size,
            num_hidden_layers=self.depth,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            max_position_embeddings=self.max_positions,
            rms_norm_eps=self.rms_norm_eps,
            rope_parameters={"rope_type": "default", "rope_theta": self.rope_theta},
            use_cache=False,
        )

    def image_config(self) -> Any:
        """Settings of the embeddings and the head of image tokens for transformers."""
        from transformers import JanusVQVAEConfig

        vq = asdict(self.vq)
        return JanusVQVAEConfig(
            embed_dim=vq["codebook_dim"],
            num_embeddings=vq["codebook_size"],
            latent_channels=vq["z_channels"],
            base_channels=vq["channels"],
            channel_multiplier=list(vq["channel_multipliers"]),
            num_res_blocks=vq["num_res_blocks"],
            num_patches=self.grid_size,
            projection_dim=self.head_width,
            num_hidden_layers=self.aligner_layers,
            image_token_embed_dim=self.width,
        )


class JanusNet(nn.Module):
    """Logits of image tokens after a text; with a cache only new tokens are read."""

    def __init__(self, sizes: JanusSizes) -> None:
        from transformers import LlamaModel
        from transformers.models.janus.modeling_janus import JanusVQVAEAlignerMLP, JanusVQVAEHead

        super().__init__()
        self.config = sizes
        image = sizes.image_config()
        parts: dict[str, nn.Module] = {
            "language_model": LlamaModel(sizes.text_config()),
            "generation_embeddings": nn.Embedding(image.num_embeddings, image.embed_dim),
            "generation_aligner": JanusVQVAEAlignerMLP(image),
            "generation_head": JanusVQVAEHead(image),
        }
        self.model = nn.ModuleDict(parts)

    @property
    def language_model(self) -> Any:
        return self.model["language_model"]

    def forward(
        self, ids: Tensor | None, text: Tensor | None, cache: KVCache | None = None, prefix_mask: Tensor | None = None
    ) -> tuple[Tensor, KVCache]:
        """Logits [B, n, V] after the last text token and after each of `ids` [B, n - 1], and the new KV cache.

        Pass an empty cache to have one filled, or None to have none. `text` [B, L] is read if nothing is cached yet.
        `prefix_mask` [B, L] is False at padding, which is on the left.
        """
        assert prefix_mask is not None
        parts = [] if text is None else [self.language_model.embed_tokens(text)]
        parts += [] if ids is None else [self.embed_image_tokens(ids)]
        h = torch.cat(parts, 1) if len(parts) > 1 else parts[0]
        start = cache[0][0].shape[2] if cache else 0
        rotary = self.language_model.rotary_emb(h, token_positions(prefix_mask, start, h.shape[1]))
        mask = padded_causal_mask(prefix_mask, start, h.shape[1])
        grown = None if cache is None else GrowingKVCache(cache)
        for layer in self.language_model.layers:
            h = layer(h, attention_mask=mask, position_embeddings=rotary, past_key_values=grown)
        if text is not None:
            h = h[:, text.shape[1] - 1 :]
        return self.read_logits(h), grown.layers if grown else ()

    def embed_image_tokens(self, ids: Tensor) -> Tensor:
        """Inputs of the language model [B, n, D] for image tokens [B, n]."""
        embedded: Tensor = self.model["generation_aligner"](self.model["generation_embeddings"](ids))
        return embedded

    def read_logits(self, h: Tensor) -> Tensor:
        """Logits over the codebook [B, n, V] in float32 of the last layer's output [B, n, D]."""
        logits: Tensor = self.model["generation_head"](self.language_model.norm(h))
        return logits.float()


class GrowingKVCache:
    """Keys and values of each layer, extended by those of new tokens: what Llama's layers need of a cache."""

    def __init__(self, past: KVCache) -> None:
        self.past = past
        self.layers: KVCache = ()

    def update(self, keys: Tensor, values: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        if self.past:
            keys, values = (torch.cat([old, new], 2) for old, new in zip(self.past[layer], (keys, values), strict=True))
        self.layers = (*self.layers, (keys, values))
        return keys, values


def token_positions(prefix_mask: Tensor, start: int, count: int) -> Tensor:
    """Positions [B, count] of tokens from `start` on; the first token after the padding is at 0."""
    padding = prefix_mask.shape[1] - prefix_mask.sum(1, keepdim=True)
    return (torch.arange(start, start + count, device=prefix_mask.device) - padding).clamp(min=0)


def llama_layers(net: JanusNet) -> Sequence[Any]:
    layers: Sequence[Any] = net.language_model.layers
    return layers


class JanusDecoder(CachedTokenDecoder):
    """Token decoder with a preallocated KV cache that calls the network's own modules, on any device."""

    net: JanusNet

    def allocate_cache(self, rows: int, like: Tensor) -> Tensor:
        return allocate_kv_cache(self.net.config, rows, like, self.prefix_length)

    def read_token(self, ids: Tensor, position: int) -> Tensor:
        assert self.request.prefix_mask is not None
        return decode_step(self.net, ids, self.request.prefix_mask[: len(ids)], self.cache, position)


def allocate_kv_cache(sizes: JanusSizes, rows: int, like: Tensor, prefix_length: int) -> Tensor:
    """An empty cache [depth, 2, rows, kv heads, positions, head dim] for a text of that length and its image."""
    positions = prefix_length + sizes.grid_size**2
    return like.new_zeros(sizes.depth, 2, rows, sizes.kv_heads, positions, sizes.head_dim)


def make_janus_decoder(net: JanusNet, request: DecodeRequest) -> JanusDecoder:
    """A decoder that reads the text without the padding that all rows have."""
    mask = request.prefix_mask
    assert mask is not None
    unused = int((~mask).sum(1).min())
    return JanusDecoder(
        net,
        DecodeRequest(request.cond[:, unused:], mask[:, unused:], request.uniform, request.sampler, request.guidance),
    )


def decode_step(net: JanusNet, ids: Tensor, prefix_mask: Tensor, cache: Tensor, position: int) -> Tensor:
    """Logits [R, V] after reading tokens [R] at `position`; their keys and values are written into the cache.

    The layers' own `forward` is not called: it may be compiled, and would be once for every length of the cache.
    """
    h = net.embed_image_tokens(ids[:, None])
    rotary = net.language_model.rotary_emb(h, token_positions(prefix_mask, position, 1))
    mask = padded_causal_mask(prefix_mask, position, 1)
    for layer, layer_cache in zip(llama_layers(net), cache, strict=True):
        normed = layer.input_layernorm(h)
        h = h + attend_with_cache(layer.self_attn, normed, rotary, mask, layer_cache[:, : len(ids)], position)
        h = h + layer.mlp(layer.post_attention_layernorm(h))
    return net.read_logits(h)[:, 0]


def attend_with_cache(
    attention: Any, x: Tensor, rotary: tuple[Tensor, Tensor], mask: Tensor, cache: Tensor, position: int
) -> Tensor:
    """Output of an attention layer for one new position [R, 1, D], with a cache [2, R, kv heads, positions, d]."""
    q, k, v = (
        project(x).view(len(x), 1, -1, attention.head_dim).transpose(1, 2)
        for project in (attention.q_proj, attention.k_proj, attention.v_proj)
    )
    cosines, sines = (factors[:, None] for factors in rotary)
    q, k = (part * cosines + rotate_half(part) * sines for part in (q, k))
    visible = cache[..., : position + 1, :]
    visible[0, :, :, -1:], visible[1, :, :, -1:] = k, v
    mixed = F.scaled_dot_product_attention(
        q.to(cache.dtype), visible[0], visible[1], mask, enable_gqa=q.shape[1] != k.shape[1]
    )
    out: Tensor = attention.o_proj(mixed.transpose(1, 2).reshape(len(x), 1, -1))
    return out


def rotate_half(x: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat([-second, first], -1)
