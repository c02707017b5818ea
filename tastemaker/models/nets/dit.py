"""Single-stream diffusion transformer: text tokens and patches attend to each other."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

FREQUENCIES = 64
MIN_TIME = 0.05  # the smallest time by which a difference to the source is divided


class SingleStreamAttention(nn.Module):
    """Self-attention with normalized queries and keys, which keeps attention logits small during training."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.size = heads, width // heads
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.query, self.key = nn.Parameter(torch.ones(self.size)), nn.Parameter(torch.ones(self.size))
        nn.init.zeros_(self.out.weight)

    def forward(self, h: Tensor) -> Tensor:
        batch, count, width = h.shape
        q, k, v = self.qkv(h).view(batch, count, 3, self.heads, self.size).permute(2, 0, 3, 1, 4)
        q = F.rms_norm(q.float(), (self.size,)) * self.query
        k = F.rms_norm(k.float(), (self.size,)) * self.key
        mixed = F.scaled_dot_product_attention(q.to(v.dtype), k.to(v.dtype), v)
        out: Tensor = self.out(mixed.transpose(1, 2).reshape(batch, count, width))
        return out


class SingleStreamBlock(nn.Module):
    """Attention and an MLP, modulated by the timestep."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.width = width
        self.attention = SingleStreamAttention(width, heads)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.table = nn.Parameter(torch.zeros(6, width))
        nn.init.zeros_(self.down.weight)

    def forward(self, h: Tensor, time: Tensor) -> Tensor:
        """Tokens [B, N, D] given modulations [B, 6, D], which all blocks share, plus a learned table per block."""
        shift, scale, gate, mlp_shift, mlp_scale, mlp_gate = (time + self.table).unsqueeze(2).unbind(1)
        x = F.layer_norm(h, (self.width,)) * (1 + scale) + shift
        h = h + self.attention(x) * (1 + gate)
        x = F.layer_norm(h, (self.width,)) * (1 + mlp_scale) + mlp_shift
        out: Tensor = h + self.down(F.gelu(self.up(x), approximate="tanh")) * (1 + mlp_gate)
        return out


class DiT(nn.Module):
    """Predicts the patches of all frames, with the text tokens before them."""

    frequencies: Tensor

    def __init__(
        self,
        *,
        vocabulary: int,
        max_text_tokens: int,
        frames: int,
        num_patches: int,
        patch_dim: int,
        width: int,
        depth: int,
        heads: int,
        has_source: bool = False,
    ) -> None:
        super().__init__()
        self.width, self.max_text_tokens, self.frames = width, max_text_tokens, frames
        self.word = nn.Embedding(vocabulary, width)
        self.word_place = nn.Parameter(torch.randn(1, max_text_tokens, width) * 0.5)
        nn.init.normal_(self.word.weight, std=0.5)  # as large as the positions, or word order would be lost
        self.enter, self.place = nn.Linear(patch_dim, width), nn.Parameter(torch.randn(1, 1, num_patches, width) * 0.02)
        if frames > 1:
            self.frame_place = nn.Parameter(torch.randn(1, frames, 1, width) * 0.02)
        if has_source:
            self.enter_source = nn.Linear(patch_dim, width, bias=False)
            nn.init.zeros_(self.enter_source.weight)  # training starts from the generator without a source
            self.keep = nn.Linear(width, 1)
            nn.init.zeros_(self.keep.weight)
            nn.init.constant_(self.keep.bias, -1.0)
        self.time, self.pooled = nn.Linear(2 * FREQUENCIES, width), nn.Linear(width, width)
        self.modulation = nn.Linear(width, 6 * width)
        self.blocks = nn.ModuleList(SingleStreamBlock(width, heads) for _ in range(depth))
        self.last, self.leave = nn.Linear(width, 2 * width), nn.Linear(width, patch_dim)
        for layer in (self.modulation, self.last):
            nn.init.zeros_(layer.weight)
            nn.init.zeros_(layer.bias)
        nn.init.normal_(self.leave.weight, std=0.02)
        steps = torch.arange(FREQUENCIES) / FREQUENCIES
        self.register_buffer("frequencies", torch.exp(steps * math.log(1000.0)) * math.pi / 2, persistent=False)

    def forward(self, x: Tensor, t: Tensor, ids: Tensor, source: Tensor | None = None) -> Tensor:
        """Output of the shape of the patches [B, F, patches, dim], at times [B] and for word ids [B, W].

        `source` are the clean patches of the image to edit, of the same shape. The network decides for each patch how
        much of it to keep, and the output is the velocity of a rectified flow towards that mixture.
        """
        words = self.word(ids)
        h = self.enter(x) + self.place
        if source is not None:
            h = h + self.enter_source(source)
        if self.frames > 1:
            h = h + self.frame_place
        h = torch.cat([words + self.word_place, h.flatten(1, 2)], 1)
        angles = t.float()[:, None] * self.frequencies
        condition = F.silu(self.time(torch.cat([angles.sin(), angles.cos()], 1)) + self.pooled(words.mean(1)))
        time = self.modulation(condition).view(-1, 6, self.width)
        for block in self.blocks:
            h = block(h, time)
        shift, scale = self.last(condition)[:, None].chunk(2, -1)
        h = F.layer_norm(h[:, self.max_text_tokens :], (self.width,)) * (1 + scale) + shift
        out: Tensor = self.leave(h).float()
        if source is None:
            return out
        # In terms of clean patches: (1 - kept) * predicted + kept * source.
        kept: Tensor = self.keep(h).float().sigmoid().view(*x.shape[:-1], 1)
        time = t.float().view(-1, *(1,) * (x.ndim - 1))
        velocity = out.view(x.shape)
        return velocity + kept * (x - time * velocity - source) / time.clamp(min=MIN_TIME)
