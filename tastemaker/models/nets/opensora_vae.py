"""The autoencoder of Open-Sora 1.2: an image VAE per frame, then a causal VAE over time, 17 frames to 5 latents.

Tensor names are those of the published file.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

CHUNK_FRAMES, CHUNK_LATENTS = 17, 5  # frames per chunk of the temporal VAE, and its latents
TEMPORAL_STRIDE = 4  # frames per latent
IMAGE_SCALE = 0.18215  # scale of the image VAE's latents
LATENT_SCALE, LATENT_SHIFT = (3.85, 2.32, 2.33, 3.06), (-0.10, 0.34, 0.27, 0.98)  # of the final latents, per channel


def num_latents(frames: int) -> int:
    """Number of latents of a video."""
    return frames // CHUNK_FRAMES * CHUNK_LATENTS + -(-(frames % CHUNK_FRAMES) // TEMPORAL_STRIDE)


def latent_index(frame: int, count: int) -> int:
    """Index of the latent that holds a frame of `count`; chunks are padded at the front."""
    chunk, within = divmod(frame, CHUNK_FRAMES)
    padding = -min(CHUNK_FRAMES, count - chunk * CHUNK_FRAMES) % TEMPORAL_STRIDE
    return chunk * CHUNK_LATENTS + (within + padding) // TEMPORAL_STRIDE


class CausalConv3d(nn.Module):
    """3-D convolution that is causal in time, with zeros before the first frame."""

    def __init__(self, inputs: int, outputs: int, size: int, stride: int = 1, *, bias: bool = True) -> None:
        super().__init__()
        side = size // 2
        self.padding = (side, side, side, side, size - stride, 0)
        self.conv = nn.Conv3d(inputs, outputs, size, (stride, 1, 1), bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.conv(F.pad(x, self.padding))
        return out


class TemporalResBlock(nn.Module):
    def __init__(self, inputs: int, outputs: int, groups: int) -> None:
        super().__init__()
        self.norm1, self.conv1 = nn.GroupNorm(groups, inputs), CausalConv3d(inputs, outputs, 3, bias=False)
        self.norm2, self.conv2 = nn.GroupNorm(groups, outputs), CausalConv3d(outputs, outputs, 3, bias=False)
        self.conv3 = CausalConv3d(inputs, outputs, 1, bias=False) if inputs != outputs else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        inner = self.conv1(F.silu(self.norm1(x)))
        out: Tensor = self.conv2(F.silu(self.norm2(inner))) + self.conv3(x)
        return out


def residual_blocks(inputs: int, outputs: int, count: int, groups: int) -> nn.ModuleList:
    widths = [inputs] + [outputs] * count
    return nn.ModuleList(TemporalResBlock(a, b, groups) for a, b in pairwise(widths))


def run_blocks(blocks: nn.Module, x: Tensor) -> Tensor:
    for block in blocks.children():
        x = block(x)
    return x


class TemporalEncoder(nn.Module):
    def __init__(self, channels: int, widths: Sequence[int], halved: Sequence[bool], count: int, groups: int) -> None:
        super().__init__()
        self.conv_in = CausalConv3d(channels, widths[0], 3, bias=False)
        self.block_res_blocks = nn.ModuleList(
            residual_blocks(a, b, count, groups) for a, b in pairwise([widths[0], *widths])
        )
        self.conv_blocks = nn.ModuleList(
            CausalConv3d(width, width, 3, 2) if half else nn.Identity()
            for width, half in zip(widths[:-1], halved, strict=True)
        )
        self.res_blocks = residual_blocks(widths[-1], widths[-1], count, groups)
        self.norm1, self.conv2 = nn.GroupNorm(groups, widths[-1]), CausalConv3d(widths[-1], 2 * channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv_in(x)
        for blocks, downsample in zip(self.block_res_blocks, [*self.conv_blocks, nn.Identity()], strict=True):
            x = downsample(run_blocks(blocks, x))
        out: Tensor = self.conv2(F.silu(self.norm1(run_blocks(self.res_blocks, x))))
        return out


class TemporalDecoder(nn.Module):
    def __init__(self, channels: int, widths: Sequence[int], halved: Sequence[bool], count: int, groups: int) -> None:
        super().__init__()
        self.conv1 = CausalConv3d(channels, widths[-1], 3)
        self.res_blocks = residual_blocks(widths[-1], widths[-1], count, groups)
        self.block_res_blocks = nn.ModuleList(
            residual_blocks(b, a, count, groups) for a, b in pairwise([*widths, widths[-1]])
        )
        self.conv_blocks = nn.ModuleList(
            CausalConv3d(width, 2 * width, 3) if half else nn.Identity()
            for width, half in zip(widths[1:], halved, strict=True)
        )
        self.norm1, self.conv_out = nn.GroupNorm(groups, widths[0]), CausalConv3d(widths[0], channels, 3)

    def forward(self, z: Tensor) -> Tensor:
        x = run_blocks(self.res_blocks, self.conv1(z))
        for blocks, expand in zip(
            reversed(self.block_res_blocks), [*reversed(self.conv_blocks), nn.Identity()], strict=True
        ):
            x = run_blocks(blocks, x)
            expanded = expand(x)
            if expanded.shape[1] != x.shape[1]:  # every other channel belongs to the later of two frames
                expanded = expanded.unflatten(1, (-1, 2)).permute(0, 1, 3, 2, 4, 5).flatten(2, 3)
            x = expanded
        out: Tensor = self.conv_out(F.silu(self.norm1(x)))
        return out


class TemporalVae(nn.Module):
    """Image latents [B, 4, n, h, w] to latents of four frames each, padded at the front, and back."""

    def __init__(
        self,
        *,
        channels: int = 4,
        filters: int = 128,
        multipliers: Sequence[int] = (1, 2, 2, 4),
        halved: Sequence[bool] = (False, True, True),
        blocks: int = 4,
        groups: int = 32,
    ) -> None:
        super().__init__()
        widths = [filters * times for times in multipliers]
        self.encoder = TemporalEncoder(channels, widths, halved, blocks, groups)
        self.quant_conv, self.post_quant_conv = (
            CausalConv3d(2 * channels, 2 * channels, 1),
            CausalConv3d(channels, channels, 1),
        )
        self.decoder = TemporalDecoder(channels, widths, halved, blocks, groups)

    def encode(self, x: Tensor) -> Tensor:
        """Means and log-variances: [B, 8, m, h, w]."""
        out: Tensor = self.quant_conv(self.encoder(F.pad(x, (0, 0, 0, 0, -x.shape[2] % TEMPORAL_STRIDE, 0))))
        return out

    def decode(self, z: Tensor, frames: int) -> Tensor:
        out: Tensor = self.decoder(self.post_quant_conv(z))
        return out[:, :, -frames % TEMPORAL_STRIDE :]


class SpatialVae(nn.Module):
    """Wraps the image VAE, for the prefix `spatial_vae.module` of the published file."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module


class OpenSoraVae(nn.Module):
    """Videos [B, 3, n, H, W] in [-1, 1] to latents [B, 4, m, h, w] and back; frames are coded in small batches."""

    scale: Tensor
    shift: Tensor

    def __init__(self, spatial: nn.Module, temporal: TemporalVae, decode_chunk_size: int = 4) -> None:
        super().__init__()
        self.spatial_vae, self.temporal_vae, self.decode_chunk_size = SpatialVae(spatial), temporal, decode_chunk_size
        self.checkpoint_decoder = False
        self.register_buffer("scale", torch.tensor(LATENT_SCALE).view(1, -1, 1, 1, 1))
        self.register_buffer("shift", torch.tensor(LATENT_SHIFT).view(1, -1, 1, 1, 1))

    def encode(self, pixels: Tensor) -> Tensor:
        """Means of the posteriors of both VAEs, normalized."""
        x = torch.cat(
            [self._encode_frames(part) for part in torch.split(flatten_frames(pixels), self.decode_chunk_size)]
        )
        x = torch.unflatten(x, 0, (len(pixels), -1)).transpose(1, 2)
        z = torch.cat([self.temporal_vae.encode(part).chunk(2, 1)[0] for part in torch.split(x, CHUNK_FRAMES, 2)], 2)
        return (z - self.shift) / self.scale

    def decode(self, z: Tensor, count: int, frames: Sequence[int] | None = None) -> Tensor:
        """All of `count` frames, or the given ones; only their chunks are decoded."""
        indices = range(count) if frames is None else [range(count)[k] for k in frames]
        chunks = {k // CHUNK_FRAMES for k in indices}
        decoded = {number: self._decode_chunk(z, number, count) for number in sorted(chunks)}
        return self._decode_frames(
            torch.stack([decoded[k // CHUNK_FRAMES][:, :, k % CHUNK_FRAMES] for k in indices], 2)
        )

    def decode_single_latents(self, z: Tensor, indices: Sequence[int]) -> Tensor:
        """Frames of latents decoded one by one, as VADER does; they differ from the frames of the decoded video."""
        raw = z * self.scale + self.shift
        return self._decode_frames(torch.cat([self._decode_temporal(raw[:, :, k : k + 1], 1) for k in indices], 2))

    def _decode_chunk(self, z: Tensor, number: int, count: int) -> Tensor:
        raw = z[:, :, number * CHUNK_LATENTS : (number + 1) * CHUNK_LATENTS] * self.scale + self.shift
        return self._decode_temporal(raw, min(CHUNK_FRAMES, count - number * CHUNK_FRAMES))

    def _decode_temporal(self, raw: Tensor, frames: int) -> Tensor:
        decode = self.temporal_vae.decode
        if not (self.checkpoint_decoder and torch.is_grad_enabled()):
            return decode(raw, frames)
        out: Tensor = checkpoint(decode, raw, frames, use_reentrant=False)
        return out

    def _decode_frames(self, x: Tensor) -> Tensor:
        """Decode frames in small batches: with checkpointing each keeps little, but takes gigabytes while it runs."""
        net: Any = self.spatial_vae.module
        parts = [
            net.decode(part / IMAGE_SCALE, return_dict=False)[0]
            for part in torch.split(flatten_frames(x), self.decode_chunk_size)
        ]
        return torch.unflatten(torch.cat(parts), 0, (len(x), -1)).transpose(1, 2)

    def _encode_frames(self, pixels: Tensor) -> Tensor:
        net: Any = self.spatial_vae.module
        mean: Tensor = net.encode(pixels).latent_dist.mode()
        return mean * IMAGE_SCALE


def flatten_frames(clips: Tensor) -> Tensor:
    """Frames of all videos: [B * n, C, H, W]."""
    return clips.transpose(1, 2).flatten(0, 1)
