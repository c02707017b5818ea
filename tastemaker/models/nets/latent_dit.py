"""DiT with AdaLN-Zero (Peebles and Xie 2023), conditioned on the timestep and on a class or text."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class EmbeddingConvention:
    """In which published implementations of the same network differ."""

    sine_first: bool = False  # sines before cosines in the timestep embedding
    downscale_freq_shift: int = 0  # as in diffusers' timestep embedding
    rows_first: bool = False  # rows before columns in the position embedding
    eps: float = 1e-6  # of the norm before the MLP


EMBEDDING_CONVENTIONS = {
    "facebook": EmbeddingConvention(),
    "diffusers": EmbeddingConvention(downscale_freq_shift=1, eps=1e-5),  # how diffusers uses facebook's weights
    "explainingai": EmbeddingConvention(sine_first=True, rows_first=True),
}


@dataclass(frozen=True)
class LatentDiTConfig:
    channels: int  # of the latents
    side: int  # of the latents
    patch_size: int
    width: int
    depth: int
    heads: int
    intermediate_size: int  # of the MLPs
    outputs: int = 0  # output channels: twice `channels` with a learned variance; 0: as many as `channels`
    num_classes: int = 0  # class conditioning; one more embedding is the unconditional one
    vocabulary: int = 0  # text conditioning by word ids
    text_embed_dim: int = 0  # text conditioning by the features of a text encoder
    max_text_tokens: int = 0  # text tokens before the patches
    timestep_embed_dim: int = 256  # sines and cosines together
    convention: EmbeddingConvention = EmbeddingConvention()
    head_dim: int = 0  # 0: width / heads

    @property
    def attention_width(self) -> int:
        return self.heads * self.head_dim or self.width

    @property
    def out_channels(self) -> int:
        return self.outputs or self.channels


def sinusoidal_embedding(
    values: Tensor, count: int, convention: EmbeddingConvention, longest: float = 10_000.0
) -> Tensor:
    """Sinusoidal embedding [N, count] of values [N]."""
    half = count // 2
    place = torch.arange(half, device=values.device, dtype=torch.float32)
    angles = values.float()[:, None] * torch.exp(-math.log(longest) * place / (half - convention.downscale_freq_shift))
    waves = (angles.sin(), angles.cos())
    return torch.cat(waves if convention.sine_first else waves[::-1], 1)


def position_embedding_2d(side: int, width: int, convention: EmbeddingConvention) -> Tensor:
    """Sinusoidal position embedding [side * side, width] of columns and rows."""
    quarter = width // 4
    steps = torch.arange(side, dtype=torch.float64)
    rates = 10_000.0 ** (-torch.arange(quarter, dtype=torch.float64) / quarter)
    angles = steps[:, None] * rates
    line = torch.cat([angles.sin(), angles.cos()], 1).float()  # [side, width / 2]
    rows, columns = line[:, None].expand(-1, side, -1), line[None].expand(side, -1, -1)
    parts = (rows, columns) if convention.rows_first else (columns, rows)
    return torch.cat(parts, -1).flatten(0, 1)


class LatentDiTAttention(nn.Module):
    def __init__(self, width: int, heads: int, mixed: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(width, 3 * mixed), nn.Linear(mixed, width)

    def forward(self, h: Tensor) -> Tensor:
        batch, count, _ = h.shape
        q, k, v = self.qkv(h).view(batch, count, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v)
        out: Tensor = self.out(mixed.transpose(1, 2).reshape(batch, count, -1))
        return out


class LatentDiTBlock(nn.Module):
    """Attention and an MLP with AdaLN-Zero modulation."""

    def __init__(self, config: LatentDiTConfig) -> None:
        super().__init__()
        self.width, self.eps = config.width, config.convention.eps
        self.modulation = nn.Linear(config.width, 6 * config.width)
        self.attention = LatentDiTAttention(config.width, config.heads, config.attention_width)
        self.up, self.down = (
            nn.Linear(config.width, config.intermediate_size),
            nn.Linear(config.intermediate_size, config.width),
        )

    def forward(self, h: Tensor, condition: Tensor) -> Tensor:
        """Tokens [B, N, D] given a condition [B, D]."""
        shift, scale, gate, mlp_shift, mlp_scale, mlp_gate = self.modulation(condition)[:, None].chunk(6, -1)
        h = h + gate * self.attention(modulate(h, shift, scale, 1e-6))
        x = modulate(h, mlp_shift, mlp_scale, self.eps)
        out: Tensor = h + mlp_gate * self.down(F.gelu(self.up(x), approximate="tanh"))
        return out


def modulate(h: Tensor, shift: Tensor, scale: Tensor, eps: float) -> Tensor:
    return F.layer_norm(h, h.shape[-1:], eps=eps) * (1 + scale) + shift


class LatentDiT(nn.Module):
    """Predicts noise or velocity of latents, given a timestep and an optional class or text."""

    place: Tensor

    def __init__(self, config: LatentDiTConfig, *, zero_init: bool = True) -> None:
        super().__init__()
        self.config, width = config, config.width
        self.enter = nn.Conv2d(config.channels, width, config.patch_size, config.patch_size)
        self.register_buffer(
            "place",
            position_embedding_2d(config.side // config.patch_size, width, config.convention)[None],
            persistent=False,
        )
        self.time_in, self.time_out = nn.Linear(config.timestep_embed_dim, width), nn.Linear(width, width)
        if config.num_classes:
            self.kind = nn.Embedding(config.num_classes + 1, width)
        if config.max_text_tokens:
            self.word: nn.Module = (
                nn.Embedding(config.vocabulary, width) if config.vocabulary else nn.Linear(config.text_embed_dim, width)
            )
            self.word_place = nn.Parameter(torch.randn(1, config.max_text_tokens, width) * 0.02)
            self.pooled = nn.Linear(width, width)
        self.blocks = nn.ModuleList(LatentDiTBlock(config) for _ in range(config.depth))
        self.last = nn.Linear(width, 2 * width)
        self.leave = nn.Linear(width, config.patch_size**2 * config.out_channels)
        self._initialize(zero_init=zero_init)

    def _initialize(self, *, zero_init: bool) -> None:
        """The published initialization; with `zero_init` all gates and the output layer start at zero."""
        for layer in self.modules():
            if isinstance(layer, nn.Linear | nn.Conv2d):
                nn.init.xavier_uniform_(layer.weight.flatten(1) if isinstance(layer, nn.Conv2d) else layer.weight)
                nn.init.zeros_(layer.bias) if layer.bias is not None else None
            elif isinstance(layer, nn.Embedding):
                nn.init.normal_(layer.weight, std=0.02)
        for layer in (self.time_in, self.time_out):
            nn.init.normal_(layer.weight, std=0.02)
        gates = [block.modulation for block in self.blocks if isinstance(block, LatentDiTBlock)]
        for layer in (*gates, self.last, self.leave) if zero_init else ():
            nn.init.zeros_(layer.weight)
            nn.init.zeros_(layer.bias)

    def forward(self, x: Tensor, time: Tensor, inputs: Tensor | None = None) -> Tensor:
        """Output [B, outputs, h, w] for latents [B, C, h, w] at times [B].

        The inputs are classes [B], word ids [B, W] or text features [B, W, F].
        """
        h = self.enter(x).flatten(2).transpose(1, 2) + self.place.to(self.enter.weight.dtype)
        waves = sinusoidal_embedding(time, self.config.timestep_embed_dim, self.config.convention)
        condition = self.time_out(F.silu(self.time_in(waves.to(h.dtype))))
        if self.config.num_classes and inputs is not None:
            condition = condition + self.kind(inputs)
        if self.config.max_text_tokens and inputs is not None:
            words = self.word(inputs)
            condition = condition + self.pooled(words.mean(1))
            h = torch.cat([words + self.word_place, h], 1)
        condition = F.silu(condition)
        for block in self.blocks:
            h = block(h, condition)
        shift, scale = self.last(condition)[:, None].chunk(2, -1)
        out: Tensor = self.leave(modulate(h[:, self.config.max_text_tokens :], shift, scale, 1e-6))
        return self._unpatchify(out).float()

    def _unpatchify(self, patches: Tensor) -> Tensor:
        size, side = self.config.patch_size, self.config.side // self.config.patch_size
        grid = patches.reshape(len(patches), side, side, size, size, self.config.out_channels)
        return grid.permute(0, 5, 1, 3, 2, 4).reshape(len(patches), self.config.out_channels, side * size, side * size)
