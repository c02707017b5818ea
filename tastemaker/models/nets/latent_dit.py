"""DiT with AdaLN-Zero (Peebles and Xie 2023): patches of latents, under a time and a class or words."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class EmbeddingConvention:
    """In what trainers of the same network differ."""

    sine_first: bool = False  # of the waves that tell the time
    gap: int = 0  # by how much the slowest wave falls short of the next one's place
    rows_first: bool = False  # of a patch's place, before its column
    eps: float = 1e-6  # of the norm before the perceptron


EMBEDDING_CONVENTIONS = {
    "facebook": EmbeddingConvention(),
    "diffusers": EmbeddingConvention(gap=1, eps=1e-5),  # which is how facebook's weights are used there
    "explainingai": EmbeddingConvention(sine_first=True, rows_first=True),
}


@dataclass(frozen=True)
class LatentDiTConfig:
    channels: int  # of the latents
    side: int  # likewise
    patch: int
    width: int
    depth: int
    heads: int
    inner: int  # of the perceptrons
    outputs: int = 0  # channels that come out, twice as many where a variance is learned; as many as go in if 0
    classes: int = 0  # told by number; one more stands for none
    vocabulary: int = 0  # words told by number
    features: int = 0  # of a word that an encoder has read
    words: int = 0  # that stand before the patches
    waves: int = 256  # that tell the time, sines and cosines together
    habit: EmbeddingConvention = EmbeddingConvention()
    head: int = 0  # width of one; together they are as wide as the network if 0

    @property
    def mixed(self) -> int:
        return self.heads * self.head or self.width

    @property
    def leaving(self) -> int:
        return self.outputs or self.channels


def sinusoidal_embedding(values: Tensor, count: int, habit: EmbeddingConvention, longest: float = 10_000.0) -> Tensor:
    """Sines and cosines of numbers [N]: [N, count]."""
    half = count // 2
    place = torch.arange(half, device=values.device, dtype=torch.float32)
    angles = values.float()[:, None] * torch.exp(-math.log(longest) * place / (half - habit.gap))
    both = (angles.sin(), angles.cos())
    return torch.cat(both if habit.sine_first else both[::-1], 1)


def position_embedding_2d(side: int, width: int, habit: EmbeddingConvention) -> Tensor:
    """Where each patch lies, as sines and cosines of its column and its row: [side * side, width]."""
    quarter = width // 4
    steps = torch.arange(side, dtype=torch.float64)
    rates = 10_000.0 ** (-torch.arange(quarter, dtype=torch.float64) / quarter)
    angles = steps[:, None] * rates
    line = torch.cat([angles.sin(), angles.cos()], 1).float()  # [side, width / 2]
    rows, columns = line[:, None].expand(-1, side, -1), line[None].expand(side, -1, -1)
    both = (rows, columns) if habit.rows_first else (columns, rows)
    return torch.cat(both, -1).flatten(0, 1)


class LatentDiTAttention(nn.Module):
    def __init__(self, width: int, heads: int, mixed: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(width, 3 * mixed), nn.Linear(mixed, width)

    def forward(self, h: Tensor) -> Tensor:
        rows, count, _ = h.shape
        q, k, v = self.qkv(h).view(rows, count, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v)
        out: Tensor = self.out(mixed.transpose(1, 2).reshape(rows, count, -1))
        return out


class LatentDiTBlock(nn.Module):
    """Attention and a perceptron, shifted, scaled and gated by what is told."""

    def __init__(self, shape: LatentDiTConfig) -> None:
        super().__init__()
        self.width, self.eps = shape.width, shape.habit.eps
        self.modulation = nn.Linear(shape.width, 6 * shape.width)
        self.attention = LatentDiTAttention(shape.width, shape.heads, shape.mixed)
        self.up, self.down = nn.Linear(shape.width, shape.inner), nn.Linear(shape.inner, shape.width)

    def forward(self, h: Tensor, told: Tensor) -> Tensor:
        """Tokens [B, N, D] under a condition [B, D]."""
        shift, scale, gate, later_shift, later_scale, later_gate = self.modulation(told)[:, None].chunk(6, -1)
        h = h + gate * self.attention(modulate(h, shift, scale, 1e-6))
        seen = modulate(h, later_shift, later_scale, self.eps)
        out: Tensor = h + later_gate * self.down(F.gelu(self.up(seen), approximate="tanh"))
        return out


def modulate(h: Tensor, shift: Tensor, scale: Tensor, eps: float) -> Tensor:
    return F.layer_norm(h, h.shape[-1:], eps=eps) * (1 + scale) + shift


class LatentDiT(nn.Module):
    """Latents at a time, with what they are told, to what they should become."""

    place: Tensor
    unsliced = True  # what attention says goes through one product, whose gradient is a tensor of its own

    def __init__(self, shape: LatentDiTConfig, *, closed: bool = True) -> None:
        super().__init__()
        self.shape, width = shape, shape.width
        self.enter = nn.Conv2d(shape.channels, width, shape.patch, shape.patch)
        self.register_buffer(
            "place", position_embedding_2d(shape.side // shape.patch, width, shape.habit)[None], persistent=False
        )
        self.time_in, self.time_out = nn.Linear(shape.waves, width), nn.Linear(width, width)
        if shape.classes:
            self.kind = nn.Embedding(shape.classes + 1, width)
        if shape.words:
            self.word: nn.Module = (
                nn.Embedding(shape.vocabulary, width) if shape.vocabulary else nn.Linear(shape.features, width)
            )
            self.word_place = nn.Parameter(torch.randn(1, shape.words, width) * 0.02)
            self.pooled = nn.Linear(width, width)
        self.blocks = nn.ModuleList(LatentDiTBlock(shape) for _ in range(shape.depth))
        self.last = nn.Linear(width, 2 * width)
        self.leave = nn.Linear(width, shape.patch**2 * shape.leaving)
        self._begin(closed=closed)

    def _begin(self, *, closed: bool) -> None:
        """As published: every block begins as nothing, and so does the output, if they begin closed."""
        for layer in self.modules():
            if isinstance(layer, nn.Linear | nn.Conv2d):
                nn.init.xavier_uniform_(layer.weight.flatten(1) if isinstance(layer, nn.Conv2d) else layer.weight)
                nn.init.zeros_(layer.bias) if layer.bias is not None else None
            elif isinstance(layer, nn.Embedding):
                nn.init.normal_(layer.weight, std=0.02)
        for layer in (self.time_in, self.time_out):
            nn.init.normal_(layer.weight, std=0.02)
        gates = [block.modulation for block in self.blocks if isinstance(block, LatentDiTBlock)]
        for layer in (*gates, self.last, self.leave) if closed else ():
            nn.init.zeros_(layer.weight)
            nn.init.zeros_(layer.bias)

    def forward(self, x: Tensor, time: Tensor, said: Tensor | None = None) -> Tensor:
        """[B, C, h, w] at times [B], for classes [B], word ids [B, W] or features [B, W, F]: [B, outputs, h, w]."""
        h = self.enter(x).flatten(2).transpose(1, 2) + self.place.to(self.enter.weight.dtype)
        told = self.time_out(
            F.silu(self.time_in(sinusoidal_embedding(time, self.shape.waves, self.shape.habit).to(h.dtype)))
        )
        if self.shape.classes and said is not None:
            told = told + self.kind(said)
        if self.shape.words and said is not None:
            words = self.word(said)
            told = told + self.pooled(words.mean(1))
            h = torch.cat([words + self.word_place, h], 1)
        told = F.silu(told)
        for block in self.blocks:
            h = block(h, told)
        shift, scale = self.last(told)[:, None].chunk(2, -1)
        out: Tensor = self.leave(modulate(h[:, self.shape.words :], shift, scale, 1e-6))
        return self._joined(out).float()

    def _joined(self, cut: Tensor) -> Tensor:
        size, side = self.shape.patch, self.shape.side // self.shape.patch
        whole = cut.reshape(len(cut), side, side, size, size, self.shape.leaving)
        return whole.permute(0, 5, 1, 3, 2, 4).reshape(len(cut), self.shape.leaving, side * size, side * size)
