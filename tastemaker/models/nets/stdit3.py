"""STDiT3, the network of Open-Sora 1.2: alternating spatial and temporal blocks, with cross-attention to the prompt.

Tensor names are the published ones, so that published weights and LoRA files load.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

PATCH = 2  # latents per side of a token
FREQUENCIES = 256
EPSILON = 1e-6


def sinusoidal_embedding(values: Tensor, count: int = FREQUENCIES) -> Tensor:
    """Cosines and sines [B, count] of values [B], from high to low frequency."""
    half = count // 2
    frequencies = torch.exp(-math.log(10_000) * torch.arange(half, device=values.device) / half)
    angles = values.float()[:, None] * frequencies
    return torch.cat([angles.cos(), angles.sin()], 1)


def position_embedding_2d(height: int, width: int, dim: int, scale: float, device: torch.device) -> Tensor:
    """Sinusoidal embeddings of columns and rows [height * width, dim]; `scale` is the image size over the base size."""
    side = round(math.sqrt(height * width))
    frequencies = 10_000 ** -(torch.arange(0, dim // 2, 2, device=device) / (dim // 2))
    rows, columns = (
        torch.outer(torch.arange(count, device=device) / scale * side / count, frequencies) for count in (height, width)
    )
    along_rows, along_columns = (torch.cat([angles.sin(), angles.cos()], 1) for angles in (rows, columns))
    both = along_columns[None].expand(height, -1, -1), along_rows[:, None].expand(-1, width, -1)
    return torch.cat(both, -1).reshape(height * width, dim)


def apply_rotary_emb(x: Tensor, frequencies: Tensor) -> Tensor:
    """Rotate pairs of neighboring channels of [B, heads, n, d] by position times frequency."""
    angles = torch.outer(torch.arange(x.shape[2], device=x.device, dtype=torch.float32), frequencies.float())
    first, second = torch.unflatten(x.float(), -1, (-1, 2)).unbind(-1)
    cos, sin = angles.cos(), angles.sin()
    return torch.stack([first * cos - second * sin, second * cos + first * sin], -1).flatten(-2).to(x.dtype)


class HeadRMSNorm(nn.Module):
    """RMS norm of each head, computed in float32."""

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
    """Embeds the timestep or the frame rate."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(FREQUENCIES, width), nn.SiLU(), nn.Linear(width, width))

    def forward(self, values: Tensor, dtype: torch.dtype) -> Tensor:
        out: Tensor = self.mlp(sinusoidal_embedding(values).to(dtype))
        return out


class CaptionEmbedder(nn.Module):
    """Projects text embeddings; `y_embedding` are the embeddings of the empty prompt."""

    y_embedding: Tensor

    def __init__(self, caption_dim: int, width: int, max_text_tokens: int) -> None:
        super().__init__()
        self.y_proj = Mlp(caption_dim, width, width)
        self.register_buffer("y_embedding", torch.randn(max_text_tokens, caption_dim) / caption_dim**0.5)


class SelfAttention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.q_norm, self.k_norm = HeadRMSNorm(width // heads), HeadRMSNorm(width // heads)

    def forward(self, x: Tensor, frequencies: Tensor | None) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        q, k = self.q_norm(q), self.k_norm(k)
        if frequencies is not None:
            q, k = apply_rotary_emb(q, frequencies), apply_rotary_emb(k, frequencies)
        out: Tensor = self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return out


class CrossAttention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.q_linear, self.kv_linear = nn.Linear(width, width), nn.Linear(width, 2 * width)
        self.proj = nn.Linear(width, width)

    def forward(self, x: Tensor, text: Tensor, text_mask: Tensor | None) -> Tensor:
        q = self.q_linear(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        k, v = self.kv_linear(text).unflatten(-1, (2, self.heads, -1)).permute(2, 0, 3, 1, 4)
        mask = None if text_mask is None else text_mask[:, None, None]
        out: Tensor = self.proj(F.scaled_dot_product_attention(q, k, v, mask).transpose(1, 2).flatten(2))
        return out


class STDiT3Block(nn.Module):
    """Attention within each frame, or with rotary `frequencies` over time at each position."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.attn, self.cross_attn = SelfAttention(width, heads), CrossAttention(width, heads)
        self.mlp = Mlp(width, 4 * width, width)
        self.scale_shift_table = nn.Parameter(torch.randn(6, width) / width**0.5)

    def forward(
        self, x: Tensor, text: Tensor, text_mask: Tensor | None, time: Tensor, frequencies: Tensor | None = None
    ) -> Tensor:
        """Tokens [B, T, S, D] given text [B, L, D], its mask [B, L], and modulations [B, T or 1, 6, D]."""
        modulation = (time + self.scale_shift_table)[:, :, :, None].unbind(2)
        shift, scale, gate, mlp_shift, mlp_scale, mlp_gate = modulation
        inner = F.layer_norm(x, x.shape[-1:], eps=EPSILON) * (1 + scale) + shift
        x = x + gate * (self._spatial(inner) if frequencies is None else self._temporal(inner, frequencies))
        x = x + self.cross_attn(x.flatten(1, 2), text, text_mask).view_as(x)
        inner = F.layer_norm(x, x.shape[-1:], eps=EPSILON) * (1 + mlp_scale) + mlp_shift
        out: Tensor = x + mlp_gate * self.mlp(inner)
        return out

    def _spatial(self, x: Tensor) -> Tensor:
        out: Tensor = self.attn(x.flatten(0, 1), None)
        return out.view_as(x)

    def _temporal(self, x: Tensor, frequencies: Tensor) -> Tensor:
        by_position = x.transpose(1, 2)
        out: Tensor = self.attn(by_position.flatten(0, 1), frequencies)
        return out.view(by_position.shape).transpose(1, 2)


class PatchEmbed3D(nn.Module):
    def __init__(self, channels: int, width: int) -> None:
        super().__init__()
        self.proj = nn.Conv3d(channels, width, (1, PATCH, PATCH), (1, PATCH, PATCH))


class T2IFinalLayer(nn.Module):
    def __init__(self, width: int, outputs: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, outputs)
        self.scale_shift_table = nn.Parameter(torch.randn(2, width) / width**0.5)

    def forward(self, x: Tensor, time: Tensor, clean_time: Tensor | None, noisy: Tensor | None) -> Tensor:
        h = self._modulate(x, time)
        if clean_time is not None and noisy is not None:
            # Frames without noise are normalized twice, as in the published code that trained the weights.
            h = torch.where(noisy[:, :, None, None], h, self._modulate(h, clean_time))
        out: Tensor = self.linear(h)
        return out

    def _modulate(self, x: Tensor, time: Tensor) -> Tensor:
        shift, scale = (time[:, None] + self.scale_shift_table)[:, None, :, None].unbind(2)
        return F.layer_norm(x, x.shape[-1:], eps=EPSILON) * (1 + scale) + shift


class RotaryFrequencies(nn.Module):
    """Rotary frequencies over time: a buffer of the published file, never trained."""

    freqs: Tensor

    def __init__(self, size: int) -> None:
        super().__init__()
        self.register_buffer("freqs", 10_000 ** -(torch.arange(0, size, 2)[: size // 2].float() / size))


class STDiT3(nn.Module):
    """Latents [B, C, T, H, W] at timesteps [B] to [B, 2 C, T, H, W]; the first half is clean minus noise."""

    def __init__(
        self,
        *,
        channels: int = 4,
        width: int = 1152,
        depth: int = 28,
        heads: int = 16,
        caption_dim: int = 4096,
        max_text_tokens: int = 300,
        base_size: int = 512,
    ) -> None:
        super().__init__()
        self.channels, self.width, self.base_size = channels, width, base_size
        self.config = {"hidden_size": width, "depth": depth, "num_heads": heads}
        self.rope, self.x_embedder = RotaryFrequencies(width // heads), PatchEmbed3D(channels, width)
        self.t_embedder, self.fps_embedder = ScalarEmbedder(width), ScalarEmbedder(width)
        self.t_block = nn.Sequential(nn.SiLU(), nn.Linear(width, 6 * width))
        self.y_embedder = CaptionEmbedder(caption_dim, width, max_text_tokens)
        self.spatial_blocks = nn.ModuleList(STDiT3Block(width, heads) for _ in range(depth))
        self.temporal_blocks = nn.ModuleList(STDiT3Block(width, heads) for _ in range(depth))
        self.final_layer = T2IFinalLayer(width, 2 * channels * PATCH**2)

    def forward(
        self,
        x: Tensor,
        timestep: Tensor,
        text: Tensor,
        text_mask: Tensor | None = None,
        noisy: Tensor | None = None,
        *,
        fps: Tensor,
        size: tuple[float, float],
    ) -> Tensor:
        """Predict at timesteps in [0, 1000] given text [B, L, C]; frames where `noisy` [B, T] is False are clean."""
        height, width = x.shape[3:]
        fps_embedding, dtype = self.fps_embedder(fps, x.dtype), x.dtype
        time, clean_time = self.t_embedder(timestep, dtype) + fps_embedding, None
        modulation = self.t_block(time).unflatten(-1, (6, self.width))[:, None]
        if noisy is not None:
            clean_time = self.t_embedder(torch.zeros_like(timestep), dtype) + fps_embedding
            clean_modulation = self.t_block(clean_time).unflatten(-1, (6, self.width))[:, None]
            modulation = torch.where(noisy[:, :, None, None], modulation, clean_modulation)
        h, grid = self._embed_patches(x, math.sqrt(size[0] * size[1]) / self.base_size)
        y = self.y_embedder.y_proj(text)
        for spatial, temporal in zip(self.spatial_blocks, self.temporal_blocks, strict=True):
            h = spatial(h, y, text_mask, modulation)
            h = temporal(h, y, text_mask, modulation, self.rope.freqs)
        out = (
            self.final_layer(h, time, clean_time, noisy)
            .unflatten(2, grid)
            .unflatten(-1, (PATCH, PATCH, 2 * self.channels))
        )
        latents = out.permute(0, 6, 1, 2, 4, 3, 5).flatten(5, 6).flatten(3, 4)
        cropped: Tensor = latents[..., :height, :width].float().clone()
        return cropped

    def _embed_patches(self, x: Tensor, scale: float) -> tuple[Tensor, tuple[int, int]]:
        """Tokens [B, T, S, D] of patches, after padding to whole patches, and the height and width of the grid."""
        x = F.pad(x, (0, -x.shape[4] % PATCH, 0, -x.shape[3] % PATCH))
        tokens = self.x_embedder.proj(x)
        grid = tokens.shape[3], tokens.shape[4]
        positions = position_embedding_2d(*grid, self.width, scale, x.device).to(tokens.dtype)
        return tokens.flatten(3).permute(0, 2, 3, 1) + positions, grid
