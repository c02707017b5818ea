"""Triton kernels of group norm and its gradient for x [B, C, ...] in contiguous order.

The programs of a plane, which is one channel of one sample, each cover a part of it. Every program that needs the
statistics of a group combines those of its parts, so that no atomic operations are needed and results repeat exactly.
"""
# mypy: ignore-errors
# Type checkers do not understand Triton's language.

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE = 4096  # elements that a program holds at once
PROGRAMS = 1024  # that compute statistics, at least, if planes are large enough


@triton.jit
def _statistics(x, statistics, pixels, span, parts, TILE: tl.constexpr):
    """Mean and sum of squared deviations of a part of a plane, by the parallel algorithm of Chan et al."""
    plane, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    count, mean, squares = 0.0, 0.0, 0.0
    last = tl.minimum((part + 1) * span, pixels)
    for start in range(part * span, last, TILE):
        pixel = start + tl.arange(0, TILE)
        valid = pixel < last
        value = tl.load(x + plane * pixels + pixel, valid, other=0.0).to(tl.float32)
        more = tl.minimum(last - start, TILE).to(tl.float32)
        own = tl.sum(value) / more
        deviation = tl.where(valid, value - own, 0.0)
        difference = own - mean
        squares += tl.sum(deviation * deviation) + difference * difference * count * more / (count + more)
        mean += difference * more / (count + more)
        count += more
    out = statistics + (plane * parts + part) * 2
    tl.store(out, mean)
    tl.store(out + 1, squares)


@triton.jit
def _normalize(
    x, statistics, weight, bias, out, moments, pixels, span, parts, channels, group_size, eps,
    ENTRIES: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    plane = tl.program_id(0).to(tl.int64)
    group = plane // group_size
    entry = tl.arange(0, ENTRIES)
    valid = entry < group_size * parts
    part = entry % parts
    count = tl.where(valid, tl.minimum(span, pixels - part * span), 0).to(tl.float32)
    first = statistics + group * group_size * parts * 2 + entry * 2
    means = tl.load(first, valid, other=0.0)
    total = (pixels * group_size).to(tl.float32)
    mean = tl.sum(count * means) / total
    squares = tl.load(first + 1, valid, other=0.0) + count * (means - mean) * (means - mean)
    factor = 1 / tl.sqrt_rn(tl.sum(squares) / total + eps)
    if (plane % group_size == 0) & (tl.program_id(1) == 0):
        tl.store(moments + group * 2, mean)
        tl.store(moments + group * 2 + 1, factor)
    channel = plane % channels
    scale = tl.load(weight + channel).to(tl.float32) * factor
    shift = tl.load(bias + channel).to(tl.float32) - mean * scale
    pixel = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = pixel < pixels
    value = tl.load(x + plane * pixels + pixel, inside, other=0.0).to(tl.float32) * scale + shift
    tl.store(out + plane * pixels + pixel, value.to(out.dtype.element_ty), inside)


@triton.jit
def _gradient_sums(grad, x, moments, sums, pixels, span, parts, group_size, TILE: tl.constexpr):
    """Sums of the gradient of a part of a plane, and of its product with the normalized input."""
    plane, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    mean = tl.load(moments + plane // group_size * 2)
    factor = tl.load(moments + plane // group_size * 2 + 1)
    plain, product = tl.zeros([TILE], tl.float32), tl.zeros([TILE], tl.float32)
    last = tl.minimum((part + 1) * span, pixels)
    for start in range(part * span, last, TILE):
        pixel = start + tl.arange(0, TILE)
        valid = pixel < last
        given = tl.load(grad + plane * pixels + pixel, valid, other=0.0).to(tl.float32)
        value = tl.load(x + plane * pixels + pixel, valid, other=0.0).to(tl.float32)
        plain += given
        product += given * (value - mean) * factor
    out = sums + (plane * parts + part) * 2
    tl.store(out, tl.sum(plain))
    tl.store(out + 1, tl.sum(product))


@triton.jit
def _gradient(
    grad, x, moments, sums, weight, out, pixels, parts, channels, group_size, ENTRIES: tl.constexpr, TILE: tl.constexpr
):
    plane = tl.program_id(0).to(tl.int64)
    group, channel = plane // group_size, plane % channels
    entry = tl.arange(0, ENTRIES)
    valid = entry < group_size * parts
    weights = tl.load(weight + group * group_size % channels + entry // parts, valid, other=0.0).to(tl.float32)
    first = sums + group * group_size * parts * 2 + entry * 2
    total = (pixels * group_size).to(tl.float32)
    plain = tl.sum(weights * tl.load(first, valid, other=0.0)) / total
    product = tl.sum(weights * tl.load(first + 1, valid, other=0.0)) / total
    mean, factor = tl.load(moments + group * 2), tl.load(moments + group * 2 + 1)
    pixel = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = pixel < pixels
    given = tl.load(grad + plane * pixels + pixel, inside, other=0.0).to(tl.float32)
    normalized = (tl.load(x + plane * pixels + pixel, inside, other=0.0).to(tl.float32) - mean) * factor
    result = factor * (given * tl.load(weight + channel).to(tl.float32) - plain - normalized * product)
    tl.store(out + plane * pixels + pixel, result.to(out.dtype.element_ty), inside)


def _parts(planes: int, pixels: int) -> tuple[int, int]:
    """Into how many parts each plane is divided, and the pixels of a part, a multiple of a tile."""
    wanted = min(triton.cdiv(PROGRAMS, planes), triton.cdiv(pixels, TILE))
    span = triton.cdiv(triton.cdiv(pixels, wanted), TILE) * TILE
    return triton.cdiv(pixels, span), span


def normalize(x: Tensor, groups: int, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Group norm of contiguous x [B, C, ...], computed in float32, and mean and 1 / deviation of groups [B, G, 2]."""
    samples, channels = x.shape[:2]
    planes, pixels, group_size = samples * channels, x[0, 0].numel(), channels // groups
    parts, span = _parts(planes, pixels)
    statistics = x.new_empty(planes, parts, 2, dtype=torch.float32)
    moments = x.new_empty(samples, groups, 2, dtype=torch.float32)
    out = torch.empty_like(x)
    _statistics[(planes, parts)](x, statistics, pixels, span, parts, TILE)
    _normalize[(planes, triton.cdiv(pixels, TILE))](
        x, statistics, weight, bias, out, moments, pixels, span, parts, channels, group_size, eps,
        triton.next_power_of_2(group_size * parts), TILE,
    )  # fmt: skip
    return out, moments


def gradient(grad: Tensor, x: Tensor, moments: Tensor, weight: Tensor) -> Tensor:
    """The gradient with respect to x, from that of the output [B, C, ...]; both are contiguous."""
    samples, groups = moments.shape[:2]
    channels, pixels = x.shape[1], x[0, 0].numel()
    planes, group_size = samples * channels, channels // groups
    parts, span = _parts(planes, pixels)
    sums = x.new_empty(planes, parts, 2, dtype=torch.float32)
    out = torch.empty_like(x)
    _gradient_sums[(planes, parts)](grad, x, moments, sums, pixels, span, parts, group_size, TILE)
    _gradient[(planes, triton.cdiv(pixels, TILE))](
        grad, x, moments, sums, weight, out, pixels, parts, channels, group_size,
        triton.next_power_of_2(group_size * parts), TILE,
    )  # fmt: skip
    return out
