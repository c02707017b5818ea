"""Triton group norm for channels_last images and videos; Triton comes with PyTorch for GPUs.

PyTorch's own kernel puts them into another order first, and convolutions then back again.
"""
# mypy: ignore-errors
# Triton's language is not Python to a type checker: pointers are added to, and every number may be a tensor.

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

PIXELS, CHANNELS = 32, 128  # of a tile
PROGRAMS, PARTS = 512, 256  # that sums are shared among, and of one row, at most


@triton.jit
def _sum(x, sums, pixels, channels, parts, span, PIXELS: tl.constexpr, CHANNELS: tl.constexpr):
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = tl.program_id(2) * CHANNELS + tl.arange(0, CHANNELS)
    inside = at < channels
    total = tl.zeros([CHANNELS], tl.float32)
    squares = tl.zeros([CHANNELS], tl.float32)
    last = tl.minimum((part + 1) * span, pixels)
    for begun in range(part * span, last, PIXELS):
        pixel = begun + tl.arange(0, PIXELS)
        place = (row * pixels + pixel)[:, None] * channels + at[None, :]
        value = tl.load(x + place, (pixel < last)[:, None] & inside[None, :], other=0.0).to(tl.float32)
        total += tl.sum(value, 0)
        squares += tl.sum(value * value, 0)
    out = sums + (row * parts + part) * 2 * channels + at
    tl.store(out, total, inside)
    tl.store(out + channels, squares, inside)


@triton.jit
def _settle(
    sums, weight, bias, scale, shift, pixels, channels, parts, each, eps, PARTS: tl.constexpr, WIDTH: tl.constexpr
):
    row, group = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at, inside = group * each + tl.arange(0, WIDTH), tl.arange(0, WIDTH) < each
    part = tl.arange(0, PARTS)
    held = sums + (row * parts + part)[:, None] * 2 * channels + at[None, :]
    there = (part < parts)[:, None] & inside[None, :]
    count = pixels * each
    mean = tl.sum(tl.load(held, there, other=0.0)) / count
    spread = tl.maximum(tl.sum(tl.load(held + channels, there, other=0.0)) / count - mean * mean, 0.0)
    factor = tl.load(weight + at, inside, other=0.0).to(tl.float32) / tl.sqrt_rn(spread + eps)
    tl.store(scale + row * channels + at, factor, inside)
    tl.store(shift + row * channels + at, tl.load(bias + at, inside, other=0.0).to(tl.float32) - mean * factor, inside)


@triton.jit
def _apply(x, scale, shift, out, pixels, channels, PIXELS: tl.constexpr, CHANNELS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    pixel = tl.program_id(1) * PIXELS + tl.arange(0, PIXELS)
    at = tl.program_id(2) * CHANNELS + tl.arange(0, CHANNELS)
    inside = at < channels
    place = (row * pixels + pixel)[:, None] * channels + at[None, :]
    there = (pixel < pixels)[:, None] & inside[None, :]
    factor = tl.load(scale + row * channels + at, inside, other=0.0)[None, :]
    added = tl.load(shift + row * channels + at, inside, other=0.0)[None, :]
    value = tl.load(x + place, there, other=0.0).to(tl.float32) * factor + added
    tl.store(out + place, value.to(out.dtype.element_ty), there)


def triton_group_norm(x: Tensor, groups: int, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """Of [B, C, ...] whose channels lie side by side, in the same order and the precision of x, computed in float32."""
    rows, channels = x.shape[:2]
    pixels = x[0, 0].numel()
    blocks = triton.cdiv(channels, CHANNELS)
    span = triton.cdiv(triton.cdiv(pixels, min(PARTS, triton.cdiv(PROGRAMS, rows))), PIXELS) * PIXELS
    parts, each = triton.cdiv(pixels, span), channels // groups
    sums = x.new_empty(rows, parts, 2, channels, dtype=torch.float32)
    scale, shift = x.new_empty(2, rows, channels, dtype=torch.float32)
    out = torch.empty_like(x)
    _sum[(rows, parts, blocks)](x, sums, pixels, channels, parts, span, PIXELS, CHANNELS)
    tile = triton.next_power_of_2(parts), triton.next_power_of_2(each)
    _settle[(rows, groups)](sums, weight, bias, scale, shift, pixels, channels, parts, each, eps, *tile)
    _apply[(rows, triton.cdiv(pixels, PIXELS), blocks)](x, scale, shift, out, pixels, channels, PIXELS, CHANNELS)
    return out
