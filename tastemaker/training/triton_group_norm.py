"""Group norm for channels_last images and videos in Triton.

PyTorch's own kernel converts them to channels-first, and the next convolution back again.
"""
# mypy: ignore-errors
# Type checkers do not understand Triton's language.

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

PIXELS, CHANNELS = 32, 128  # of a tile
PROGRAMS, PARTS = 512, 256  # programs that compute the sums, and at most how many of them share one sample


@triton.jit
def _sum(x, sums, pixels, channels, parts, span, PIXELS: tl.constexpr, CHANNELS: tl.constexpr):
    sample, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    channel = tl.program_id(2) * CHANNELS + tl.arange(0, CHANNELS)
    channel_mask = channel < channels
    total = tl.zeros([CHANNELS], tl.float32)
    squares = tl.zeros([CHANNELS], tl.float32)
    last = tl.minimum((part + 1) * span, pixels)
    for start in range(part * span, last, PIXELS):
        pixel = start + tl.arange(0, PIXELS)
        offset = (sample * pixels + pixel)[:, None] * channels + channel[None, :]
        value = tl.load(x + offset, (pixel < last)[:, None] & channel_mask[None, :], other=0.0).to(tl.float32)
        total += tl.sum(value, 0)
        squares += tl.sum(value * value, 0)
    out = sums + (sample * parts + part) * 2 * channels + channel
    tl.store(out, total, channel_mask)
    tl.store(out + channels, squares, channel_mask)


@triton.jit
def _compute_scale_and_shift(
    sums, weight, bias, scale, shift, pixels, channels, parts, group_size, eps, PARTS: tl.constexpr, WIDTH: tl.constexpr
):
    sample, group = tl.program_id(0).to(tl.int64), tl.program_id(1)
    channel, channel_mask = group * group_size + tl.arange(0, WIDTH), tl.arange(0, WIDTH) < group_size
    part = tl.arange(0, PARTS)
    pointer = sums + (sample * parts + part)[:, None] * 2 * channels + channel[None, :]
    mask = (part < parts)[:, None] & channel_mask[None, :]
    count = pixels * group_size
    mean = tl.sum(tl.load(pointer, mask, other=0.0)) / count
    variance = tl.maximum(tl.sum(tl.load(pointer + channels, mask, other=0.0)) / count - mean * mean, 0.0)
    factor = tl.load(weight + channel, channel_mask, other=0.0).to(tl.float32) / tl.sqrt_rn(variance + eps)
    tl.store(scale + sample * channels + channel, factor, channel_mask)
    tl.store(
        shift + sample * channels + channel,
        tl.load(bias + channel, channel_mask, other=0.0).to(tl.float32) - mean * factor,
        channel_mask,
    )


@triton.jit
def _apply(x, scale, shift, out, pixels, channels, PIXELS: tl.constexpr, CHANNELS: tl.constexpr):
    sample = tl.program_id(0).to(tl.int64)
    pixel = tl.program_id(1) * PIXELS + tl.arange(0, PIXELS)
    channel = tl.program_id(2) * CHANNELS + tl.arange(0, CHANNELS)
    channel_mask = channel < channels
    offset = (sample * pixels + pixel)[:, None] * channels + channel[None, :]
    mask = (pixel < pixels)[:, None] & channel_mask[None, :]
    factor = tl.load(scale + sample * channels + channel, channel_mask, other=0.0)[None, :]
    bias_value = tl.load(shift + sample * channels + channel, channel_mask, other=0.0)[None, :]
    value = tl.load(x + offset, mask, other=0.0).to(tl.float32) * factor + bias_value
    tl.store(out + offset, value.to(out.dtype.element_ty), mask)


def triton_group_norm(x: Tensor, groups: int, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """Normalize x [B, C, ...] in channels_last order; computed in float32, returned in the order and dtype of x."""
    samples, channels = x.shape[:2]
    pixels = x[0, 0].numel()
    blocks = triton.cdiv(channels, CHANNELS)
    span = triton.cdiv(triton.cdiv(pixels, min(PARTS, triton.cdiv(PROGRAMS, samples))), PIXELS) * PIXELS
    parts, group_size = triton.cdiv(pixels, span), channels // groups
    sums = x.new_empty(samples, parts, 2, channels, dtype=torch.float32)
    scale, shift = x.new_empty(2, samples, channels, dtype=torch.float32)
    out = torch.empty_like(x)
    _sum[(samples, parts, blocks)](x, sums, pixels, channels, parts, span, PIXELS, CHANNELS)
    tile = triton.next_power_of_2(parts), triton.next_power_of_2(group_size)
    _compute_scale_and_shift[(samples, groups)](
        sums, weight, bias, scale, shift, pixels, channels, parts, group_size, eps, *tile
    )
    _apply[(samples, triton.cdiv(pixels, PIXELS), blocks)](x, scale, shift, out, pixels, channels, PIXELS, CHANNELS)
    return out
