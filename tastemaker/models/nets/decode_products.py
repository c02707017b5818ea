"""Triton products of few rows in a decoding step, with the embedding and the norms around them.

Norms have no kernels of their own here: the product that adds to the residual stream also writes sums of squares of its
channels, and the next product normalizes its input while it loads it.
"""
# mypy: ignore-errors
# Kernels are not Python to a type checker: pointers are added to, and every number may be a tensor.

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .decode_weights import SQUARES_GROUP, InputNorm

GROUP = tl.constexpr(SQUARES_GROUP)


@triton.jit
def _embed(embeddings, ids, position, h, squares, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at, group = tl.arange(0, BLOCK), tl.arange(0, BLOCK // GROUP)
    x = tl.load(embeddings + tl.load(ids + row) * width + at, at < width, other=0.0)
    tl.store(h + row * width + at, x, at < width)
    exact = x.to(tl.float32)
    count = tl.cdiv(width, GROUP)
    sums = tl.sum(tl.reshape(exact * exact, [BLOCK // GROUP, GROUP]), 1)
    tl.store(squares + row * count + group, sums, group < count)
    if row == 0:
        tl.store(position, tl.load(position) + 1)


def embed(embeddings: Tensor, ids: Tensor, position: Tensor, h: Tensor, squares: Tensor) -> None:
    """Write the embeddings of the ids [R] and the sums of their squares [R, D / 16], and advance the position."""
    block = max(triton.next_power_of_2(h.shape[1]), SQUARES_GROUP)
    _embed[(len(h),)](embeddings, ids, position, h, squares, h.shape[1], block, num_warps=min(max(block // 512, 1), 16))


@triton.jit
def _load_inputs(x, row, rows, at, width):
    """Some columns [R, K] of a matrix of inputs."""
    inside = (row < rows)[:, None] & (at < width)[None, :]
    return tl.load(x + row[:, None] * width + at[None, :], inside, other=0.0)


@triton.jit
def _load_weights(weight, column, height, at, width):
    """Some numbers [K, M] of some rows of a matrix of weights, transposed."""
    inside = (column < height)[None, :] & (at < width)[:, None]
    return tl.load(weight + column[None, :].to(tl.int64) * width + at[:, None], inside, other=0.0)


@triton.jit
def _rms_scales(squares, row, rows, width, eps, GROUPS: tl.constexpr, BLOCK: tl.constexpr):
    """1 / RMS of some rows, from the sums of squares of their groups of channels."""
    sums = _load_inputs(squares, row, rows, tl.arange(0, BLOCK), GROUPS)
    return 1 / tl.sqrt_rn(tl.sum(sums, 1) / width + eps)


@triton.jit
def _normalize(x, scales, norm, out: tl.constexpr):
    """Rows times their scales and the norm's weight, rounded where the network rounds."""
    rounded = (x.to(tl.float32) * scales[:, None]).to(x.dtype).to(tl.float32)
    return (rounded * norm.to(tl.float32)[None, :]).to(out)


@triton.jit(do_not_specialize=["rows"])
def _gated_linear(
    x, weight, scale, out, norm, squares, rows, width, hidden, eps,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEEP: tl.constexpr, STAGES: tl.constexpr,
    EXACT: tl.constexpr, SCALED: tl.constexpr, GROUPS: tl.constexpr, GROUPS_BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    other = weight + hidden.to(tl.int64) * width
    kind: tl.constexpr = out.dtype.element_ty
    rounding: tl.constexpr = "ieee" if EXACT else "tf32"
    deep = tl.arange(0, DEEP)
    if GROUPS > 0:
        factor = tl.load(norm + deep, deep < width, other=0.0)
        scales = _rms_scales(squares, row, rows, width, eps, GROUPS, GROUPS_BLOCK)
    first, second = tl.zeros([ROWS, COLUMNS], tl.float32), tl.zeros([ROWS, COLUMNS], tl.float32)
    for at in tl.range(0, width, DEEP, num_stages=STAGES):
        given = _load_inputs(x, row, rows, at + deep, width)
        if GROUPS > 0:
            given = _normalize(given, scales, factor, kind)
            factor = tl.load(norm + at + DEEP + deep, at + DEEP + deep < width, other=0.0)  # of the next tile
        # 8-bit numbers become 16-bit ones without rounding.
        numbers = _load_weights(weight, column, hidden, at + deep, width).to(kind)
        first = tl.dot(given, numbers, first, input_precision=rounding)
        numbers = _load_weights(other, column, hidden, at + deep, width).to(kind)
        second = tl.dot(given, numbers, second, input_precision=rounding)
    if SCALED:
        first *= tl.load(scale + column, column < hidden, other=0.0)[None, :]
        second *= tl.load(scale + hidden + column, column < hidden, other=0.0)[None, :]
    # Rounds where the products and the gate of the network round.
    first = first.to(kind).to(tl.float32)
    gate = (first / (1 + tl.exp(-first))).to(kind).to(tl.float32)
    result = gate * second.to(kind).to(tl.float32)
    inside = (row < rows)[:, None] & (column < hidden)[None, :]
    tl.store(out + row[:, None] * hidden + column[None, :], result.to(kind), inside)


def gated_linear(
    x: Tensor, weight: Tensor, out: Tensor, columns: int = 32, deep: int = 128, stages: int = 3, warps: int = 4,
    *, scale: Tensor | None = None, norm: InputNorm | None = None,
) -> None:  # fmt: skip
    """silu(x w1) * (x w3) of x [R, D], with w1 above w3 in one matrix [2 F, D]; for few rows.

    With a `scale` per row of the matrix [2 F, 1], its numbers have 8 bits. With a `norm`, x is normalized first.
    """
    rows = triton.next_power_of_2(max(min(len(x), 64), 16))
    grid = triton.cdiv(out.shape[1], columns), triton.cdiv(len(x), rows)
    _gated_linear[grid](
        x, weight, *_operands(weight, out, scale, norm), len(x), x.shape[1], out.shape[1], norm.eps if norm else 0.0,
        rows, columns, deep, stages, out.dtype == torch.float32, scale is not None,
        *_groups(norm), num_warps=warps,
    )  # fmt: skip


@triton.jit(do_not_specialize=["rows"])
def _linear(
    x, weight, scale, out, norm, squares, rows, width, height, eps,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEEP: tl.constexpr, STAGES: tl.constexpr,
    EXACT: tl.constexpr, SCALED: tl.constexpr, GROUPS: tl.constexpr, GROUPS_BLOCK: tl.constexpr,
    ADDS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    own = out + row[:, None] * height + column[None, :]
    inside = (row < rows)[:, None] & (column < height)[None, :]
    kind: tl.constexpr = x.dtype.element_ty if ADDS else out.dtype.element_ty  # of the product
    rounding: tl.constexpr = "ieee" if EXACT else "tf32"
    deep = tl.arange(0, DEEP)
    if GROUPS > 0:
        factor = tl.load(norm + deep, deep < width, other=0.0)
    if ADDS:
        residual = tl.load(own, inside, other=0.0)
    if GROUPS > 0:
        scales = _rms_scales(squares, row, rows, width, eps, GROUPS, GROUPS_BLOCK)
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for at in tl.range(0, width, DEEP, num_stages=STAGES):
        given = _load_inputs(x, row, rows, at + deep, width)
        if GROUPS > 0:
            given = _normalize(given, scales, factor, kind)
            factor = tl.load(norm + at + DEEP + deep, at + DEEP + deep < width, other=0.0)  # of the next tile
        # 8-bit numbers become 16-bit ones without rounding.
        numbers = _load_weights(weight, column, height, at + deep, width).to(kind)
        total = tl.dot(given, numbers, total, input_precision=rounding)
    if SCALED:
        total *= tl.load(scale + column, column < height, other=0.0)[None, :]
    result = total.to(kind)
    if ADDS:
        result = (residual.to(tl.float32) + result.to(tl.float32)).to(residual.dtype)
        exact = result.to(tl.float32)
        sums = tl.sum(tl.reshape(exact * exact, [ROWS, COLUMNS // GROUP, GROUP]), 2)
        group, count = tl.program_id(0) * (COLUMNS // GROUP) + tl.arange(0, COLUMNS // GROUP), tl.cdiv(height, GROUP)
        known = (row < rows)[:, None] & (group < count)[None, :]
        tl.store(squares + row[:, None] * count + group[None, :], sums, known)
    tl.store(own, result, inside)


def linear(
    x: Tensor, weight: Tensor, out: Tensor, columns: int = 0, deep: int = 0, stages: int = 4, warps: int = 4,
    *, scale: Tensor | None = None, norm: InputNorm | None = None,
) -> None:  # fmt: skip
    """x W^T of x [R, K] and W [M, K]; sums are fp32.

    With a `scale` per row of the matrix [M, 1], its numbers have 8 bits. With a `norm`, x is normalized first.
    """
    columns = columns or (16 if len(weight) <= 4096 else 32)  # enough programs for all multiprocessors
    _launch_linear(x, weight, out, (columns, deep, stages, warps), scale, norm, None)


def add_linear(
    x: Tensor, weight: Tensor, h: Tensor, squares: Tensor, columns: int = 16, deep: int = 0, stages: int = 4,
    warps: int = 4, *, scale: Tensor | None = None,
) -> None:  # fmt: skip
    """Add x W^T to the residual stream [R, D], and write the sums of squares of its groups of channels [R, D / 16]."""
    _launch_linear(x, weight, h, (max(columns, SQUARES_GROUP), deep, stages, warps), scale, None, squares)


def _launch_linear(
    x: Tensor, weight: Tensor, out: Tensor, tiling: tuple[int, int, int, int],
    scale: Tensor | None, norm: InputNorm | None, squares: Tensor | None,
) -> None:  # fmt: skip
    columns, deep, stages, warps = tiling
    rows = triton.next_power_of_2(max(min(len(x), 128), 16))
    deep = deep or (256 if rows <= 32 else 128)  # enough bytes on their way, in the shared memory that there is
    stages = stages if rows <= 64 else min(stages, 2)
    exact = (out if squares is None else x).dtype == torch.float32
    grid = triton.cdiv(len(weight), columns), triton.cdiv(len(x), rows)
    _linear[grid](
        x, weight, *_operands(weight, out, scale, norm, squares), len(x), x.shape[1], len(weight),
        norm.eps if norm else 0.0, rows, columns, deep, stages, exact, scale is not None,
        *_groups(norm), squares is not None, num_warps=warps,
    )  # fmt: skip


def _operands(
    weight: Tensor, out: Tensor, scale: Tensor | None, norm: InputNorm | None, squares: Tensor | None = None
) -> tuple[Tensor, ...]:
    """Scale, output, norm and sums of squares of a product; where there is none, another tensor, which is not read."""
    scale = weight if scale is None else scale
    if norm is not None:
        return scale, out, norm.weight, norm.squares
    return scale, out, weight, weight if squares is None else squares


def _groups(norm: InputNorm | None) -> tuple[int, int]:
    """The number of sums of squares of a row, and a power of 2 that is not less; 0 if the input is not normalized."""
    return (0, 0) if norm is None else (norm.squares.shape[1], triton.next_power_of_2(norm.squares.shape[1]))
