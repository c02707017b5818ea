"""STDiT3, the network of Open-Sora 1.2: within frames, then along time, with the words of the prompt after each.

Its names of tensors are the published ones, so that the authors' files and their adapters fit.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

PATCH = 2  # latents a side of one token
FREQUENCIES = 256
EPSILON = 1e-6


def sinusoidal_embedding(numbers: Tensor, count: int = FREQUENCIES) -> Tensor:
    """Cosines and sines of numbers [B], from fast to slow: [B, count]."""
    half = count // 2
    speeds = torch.exp(-math.log(10_000) * torch.arange(half, device=numbers.device) / half)
    angles = numbers.float()[:, None] * speeds
    return torch.cat([angles.cos(), angles.sin()], 1)


def position_embedding_2d(height: int, width: int, dim: int, scale: float, device: torch.device) -> Tensor:
    """Columns and rows of a grid as waves; `scale` is the picture's side over the one that was trained first."""
    side = round(math.sqrt(height * width))
    speeds = 10_000 ** -(torch.arange(0, dim // 2, 2, device=device) / (dim // 2))
    rows, columns = (
        torch.outer(torch.arange(count, device=device) / scale * side / count, speeds) for count in (height, width)
    )
    along_rows, along_columns = (torch.cat([angles.sin(), angles.cos()], 1) for angles in (rows, columns))
    both = along_columns[None].expand(height, -1, -1), along_rows[:, None].expand(-1, width, -1)
    return torch.cat(both, -1).reshape(height * width, dim)


def apply_rotary_emb(x: Tensor, speeds: Tensor) -> Tensor:
    """Neighbouring numbers of [B, heads, n, d] as pairs, each turned by its place times its speed."""
    angles = torch.outer(torch.arange(x.shape[2], device=x.device, dtype=torch.float32), speeds.float())
    first, second = torch.unflatten(x.float(), -1, (-1, 2)).unbind(-1)
    cos, sin = angles.cos(), angles.sin()
    return torch.stack([first * cos - second * sin, second * cos + first * sin], -1).flatten(-2).to(x.dtype)


class HeadRMSNorm(nn.Module):
    """Root mean square of each head to one, whatever the precision."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), x.shape[-1:], self.weight.float(), EPSILON).to(x.dtype)


class Mlp(nn.Module):
    def __init__(self, inputs: int, hidden: int, outputs: int) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(inputs, hidden), nn.Linear(hidden, outputs)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.fc2(F.gelu(self.fc1(x), approximate="tanh"))
        return out


class ScalarEmbedder(nn.Module):
    """A number, the level or the frame rate, as a vector."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(FREQUENCIES, width), nn.SiLU(), nn.Linear(width, width))

    def forward(self, numbers: Tensor, dtype: torch.dtype) -> Tensor:
        out: Tensor = self.mlp(sinusoidal_embedding(numbers).to(dtype))
        return out


class CaptionEmbedder(nn.Module):
    """Words as tokens, and the words that stand for none."""

    y_embedding: Tensor

    def __init__(self, inputs: int, width: int, words: int) -> None:
        super().__init__()
        self.y_proj = Mlp(inputs, width, width)
        self.register_buffer("y_embedding", torch.randn(words, inputs) / inputs**0.5)


class SelfAttention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.q_norm, self.k_norm = HeadRMSNorm(width // heads), HeadRMSNorm(width // heads)

    def forward(self, x: Tensor, speeds: Tensor | None) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        q, k = self.q_norm(q), self.k_norm(k)
        if speeds is not None:
            q, k = apply_rotary_emb(q, speeds), apply_rotary_emb(k, speeds)
        out: Tensor = self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return out


class CrossAttention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.q_linear, self.kv_linear = nn.Linear(width, width), nn.Linear(width, 2 * width)
        self.proj = nn.Linear(width, width)

    def forward(self, x: Tensor, words: Tensor, seen: Tensor | None) -> Tensor:
        q = self.q_linear(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        k, v = self.kv_linear(words).unflatten(-1, (2, self.heads, -1)).permute(2, 0, 3, 1, 4)
        mask = None if seen is None else seen[:, None, None]
        out: Tensor = self.proj(F.scaled_dot_product_attention(q, k, v, mask).transpose(1, 2).flatten(2))
        return out


class STDiT3Block(nn.Module):
    """Attention among the tokens of a frame, or with `speeds` among those of a place in all frames."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.attn, self.cross_attn = SelfAttention(width, heads), CrossAttention(width, heads)
        self.mlp = Mlp(width, 4 * width, width)
        self.scale_shift_table = nn.Parameter(torch.randn(6, width) / width**0.5)

    def forward(
        self, x: Tensor, words: Tensor, seen: Tensor | None, time: Tensor, speeds: Tensor | None = None
    ) -> Tensor:
        """Tokens [B, T, S, D], words [B, L, D] and which of them are there, modulations [B, T or 1, 6, D]."""
        told = (time + self.scale_shift_table)[:, :, :, None].unbind(2)
        shift, scale, gate, later_shift, later_scale, later_gate = told
        inner = F.layer_norm(x, x.shape[-1:], eps=EPSILON) * (1 + scale) + shift
        x = x + gate * (self._within(inner) if speeds is None else self._along(inner, speeds))
        x = x + self.cross_attn(x.flatten(1, 2), words, seen).view_as(x)
        inner = F.layer_norm(x, x.shape[-1:], eps=EPSILON) * (1 + later_scale) + later_shift
        out: Tensor = x + later_gate * self.mlp(inner)
        return out

    def _within(self, x: Tensor) -> Tensor:
        out: Tensor = self.attn(x.flatten(0, 1), None)
        return out.view_as(x)

    def _along(self, x: Tensor, speeds: Tensor) -> Tensor:
        rows = x.transpose(1, 2)
        out: Tensor = self.attn(rows.flatten(0, 1), speeds)
        return out.view(rows.shape).transpose(1, 2)


class PatchEmbed3D(nn.Module):
    def __init__(self, channels: int, width: int) -> None:
        super().__init__()
        self.proj = nn.Conv3d(channels, width, (1, PATCH, PATCH), (1, PATCH, PATCH))


class T2IFinalLayer(nn.Module):
    def __init__(self, width: int, outputs: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, outputs)
        self.scale_shift_table = nn.Parameter(torch.randn(2, width) / width**0.5)

    def forward(self, x: Tensor, time: Tensor, clean: Tensor | None, free: Tensor | None) -> Tensor:
        h = self._shown(x, time)
        if clean is not None and free is not None:
            # Frames that are clean are normed twice here, which the published weights were trained with.
            h = torch.where(free[:, :, None, None], h, self._shown(h, clean))
        out: Tensor = self.linear(h)
        return out

    def _shown(self, x: Tensor, time: Tensor) -> Tensor:
        shift, scale = (time[:, None] + self.scale_shift_table)[:, None, :, None].unbind(2)
        return F.layer_norm(x, x.shape[-1:], eps=EPSILON) * (1 + scale) + shift


class RotaryFrequencies(nn.Module):
    """Of the turning that tells frames apart; kept in the authors' files, never trained."""

    freqs: Tensor

    def __init__(self, size: int) -> None:
        super().__init__()
        self.register_buffer("freqs", 10_000 ** -(torch.arange(0, size, 2)[: size // 2].float() / size))


class STDiT3(nn.Module):
    """Latents [B, C, T, H, W] at levels [B] to [B, 2 C, T, H, W], of which the first half is clean minus noise."""

    def __init__(
        self,
        *,
        channels: int = 4,
        width: int = 1152,
        depth: int = 28,
        heads: int = 16,
        caption: int = 4096,
        words: int = 300,
        side: int = 512,
    ) -> None:
        super().__init__()
        self.channels, self.width, self.side = channels, width, side
        self.config = {"hidden_size": width, "depth": depth, "num_heads": heads}
        self.rope, self.x_embedder = RotaryFrequencies(width // heads), PatchEmbed3D(channels, width)
        self.t_embedder, self.fps_embedder = ScalarEmbedder(width), ScalarEmbedder(width)
        self.t_block = nn.Sequential(nn.SiLU(), nn.Linear(width, 6 * width))
        self.y_embedder = CaptionEmbedder(caption, width, words)
        self.spatial_blocks = nn.ModuleList(STDiT3Block(width, heads) for _ in range(depth))
        self.temporal_blocks = nn.ModuleList(STDiT3Block(width, heads) for _ in range(depth))
        self.final_layer = T2IFinalLayer(width, 2 * channels * PATCH**2)

    def forward(
        self,
        x: Tensor,
        level: Tensor,
        words: Tensor,
        seen: Tensor | None = None,
        free: Tensor | None = None,
        *,
        fps: Tensor,
        size: tuple[float, float],
    ) -> Tensor:
        """Levels run from 0 to 1000; words [B, L, C] count where `seen` [B, L]; frames not `free` [B, T] are clean."""
        height, width = x.shape[3:]
        rate, dtype = self.fps_embedder(fps, x.dtype), x.dtype
        time, clean = self.t_embedder(level, dtype) + rate, None
        modulation = self.t_block(time).unflatten(-1, (6, self.width))[:, None]
        if free is not None:
            clean = self.t_embedder(torch.zeros_like(level), dtype) + rate
            still = self.t_block(clean).unflatten(-1, (6, self.width))[:, None]
            modulation = torch.where(free[:, :, None, None], modulation, still)
        h, grid = self._patches(x, math.sqrt(size[0] * size[1]) / self.side)
        told = self.y_embedder.y_proj(words)
        for within, along in zip(self.spatial_blocks, self.temporal_blocks, strict=True):
            h = within(h, told, seen, modulation)
            h = along(h, told, seen, modulation, self.rope.freqs)
        out = self.final_layer(h, time, clean, free).unflatten(2, grid).unflatten(-1, (PATCH, PATCH, 2 * self.channels))
        whole = out.permute(0, 6, 1, 2, 4, 3, 5).flatten(5, 6).flatten(3, 4)
        shown: Tensor = whole[..., :height, :width].float().clone()
        return shown

    def _patches(self, x: Tensor, scale: float) -> tuple[Tensor, tuple[int, int]]:
        """One token for four latents, sides filled up to whole ones: [B, T, S, D], and how many a side."""
        x = F.pad(x, (0, -x.shape[4] % PATCH, 0, -x.shape[3] % PATCH))
        tokens = self.x_embedder.proj(x)
        grid = tokens.shape[3], tokens.shape[4]
        where = position_embedding_2d(*grid, self.width, scale, x.device).to(tokens.dtype)
        return tokens.flatten(3).permute(0, 2, 3, 1) + where, grid
