"""A diffusion transformer in one stream: words and patches attend to each other."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

FREQUENCIES = 64


class SingleStreamAttention(nn.Module):
    """With normalised queries and keys, so that scores stay small however training goes."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.size = heads, width // heads
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.query, self.key = nn.Parameter(torch.ones(self.size)), nn.Parameter(torch.ones(self.size))
        nn.init.zeros_(self.out.weight)

    def forward(self, h: Tensor) -> Tensor:
        rows, count, width = h.shape
        q, k, v = self.qkv(h).view(rows, count, 3, self.heads, self.size).permute(2, 0, 3, 1, 4)
        q = F.rms_norm(q.float(), (self.size,)) * self.query
        k = F.rms_norm(k.float(), (self.size,)) * self.key
        mixed = F.scaled_dot_product_attention(q.to(v.dtype), k.to(v.dtype), v)
        out: Tensor = self.out(mixed.transpose(1, 2).reshape(rows, count, width))
        return out


class SingleStreamBlock(nn.Module):
    """Attention and a perceptron, both shifted, scaled and weighted by the time."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.width = width
        self.attention = SingleStreamAttention(width, heads)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.table = nn.Parameter(torch.zeros(6, width))
        nn.init.zeros_(self.down.weight)

    def forward(self, h: Tensor, time: Tensor) -> Tensor:
        """Tokens [B, N, D] under modulations [B, 6, D] that all blocks share, each with a table of its own."""
        shift, scale, gate, later_shift, later_scale, later_gate = (time + self.table).unsqueeze(2).unbind(1)
        seen = F.layer_norm(h, (self.width,)) * (1 + scale) + shift
        h = h + self.attention(seen) * (1 + gate)
        seen = F.layer_norm(h, (self.width,)) * (1 + later_scale) + later_shift
        out: Tensor = h + self.down(F.gelu(self.up(seen), approximate="tanh")) * (1 + later_gate)
        return out


class DiT(nn.Module):
    """Tokens of all frames, with the words before them, to what the tokens should become."""

    frequencies: Tensor

    def __init__(
        self, *, vocabulary: int, words: int, frames: int, cells: int, inputs: int, width: int, depth: int, heads: int
    ) -> None:
        super().__init__()
        self.width, self.words, self.frames = width, words, frames
        self.word = nn.Embedding(vocabulary, width)
        self.word_place = nn.Parameter(torch.randn(1, words, width) * 0.5)
        nn.init.normal_(self.word.weight, std=0.5)  # places and words alike in size, or their order would not show
        self.enter, self.place = nn.Linear(inputs, width), nn.Parameter(torch.randn(1, 1, cells, width) * 0.02)
        if frames > 1:
            self.frame_place = nn.Parameter(torch.randn(1, frames, 1, width) * 0.02)
        self.time, self.pooled = nn.Linear(2 * FREQUENCIES, width), nn.Linear(width, width)
        self.modulation = nn.Linear(width, 6 * width)
        self.blocks = nn.ModuleList(SingleStreamBlock(width, heads) for _ in range(depth))
        self.last, self.leave = nn.Linear(width, 2 * width), nn.Linear(width, inputs)
        for layer in (self.modulation, self.last):
            nn.init.zeros_(layer.weight)
            nn.init.zeros_(layer.bias)
        nn.init.normal_(self.leave.weight, std=0.02)
        steps = torch.arange(FREQUENCIES) / FREQUENCIES
        self.register_buffer("frequencies", torch.exp(steps * math.log(1000.0)) * math.pi / 2, persistent=False)

    def forward(self, x: Tensor, t: Tensor, ids: Tensor) -> Tensor:
        """Patches [B, F, cells, inputs] at levels [B], for words [B, W]: an output of the same shape."""
        words = self.word(ids)
        h = self.enter(x) + self.place
        if self.frames > 1:
            h = h + self.frame_place
        h = torch.cat([words + self.word_place, h.flatten(1, 2)], 1)
        angles = t.float()[:, None] * self.frequencies
        told = F.silu(self.time(torch.cat([angles.sin(), angles.cos()], 1)) + self.pooled(words.mean(1)))
        time = self.modulation(told).view(-1, 6, self.width)
        for block in self.blocks:
            h = block(h, time)
        shift, scale = self.last(told)[:, None].chunk(2, -1)
        out: Tensor = self.leave(F.layer_norm(h[:, self.words :], (self.width,)) * (1 + scale) + shift)
        return out.float()
