"""Triton kernels of a decoding step (norm, products of few rows, attention, sampling); usable inside CUDA graphs.

The module implements `cuda_graph_decoder.DecodeKernels`. Triton comes with PyTorch for GPUs.

A step is a chain of short kernels. On Hopper and newer GPUs each of them can be launched while the one before still
runs (programmatic dependent launch): it loads its first weights, or the first keys and values of earlier positions,
which no other kernel of the chain writes, and waits for the end of the one before only then.

For few rows, norms have no kernels. The product that adds to the residual stream also writes sums of squares of its
channels, and the next product normalizes its input while it loads it.
"""
# mypy: ignore-errors
# Kernels are not Python to a type checker: pointers are added to, and every number may be a tensor.

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .decode_weights import SQUARES_GROUP, InputNorm

MAX_SAMPLED_CODES = 32768  # largest codebook that one program samples from
MAX_LINEAR_ROWS = 32  # most rows for which `linear` and `gated_linear` are faster than products by cuBLAS
MAX_FUSED_ROWS = 32  # most rows for which norms are part of products
STAGES, TILE, WARPS = 2, 4096, 4  # of attention: tiles of keys in flight, elements per tile, warps per program
CACHE_AHEAD = True  # whether attention loads its first tile of keys and values before queries are ready
WEIGHTS_AHEAD = 256  # numbers of each row of a matrix that a product loads before its input is ready
EARLY_LAUNCH = True  # whether kernels are launched before the ones before have ended
PREFETCH_BYTES = 2**23  # of the largest matrix that is fetched into the L2 cache before the input of its product is ready
CACHE_PREFETCH_BYTES = 0  # of the largest KV cache of a layer that is fetched into the L2 cache early
HOPPER = (9, 0)  # the first GPUs with programmatic dependent launch
GROUP = tl.constexpr(SQUARES_GROUP)


@cache
def _can_launch_early(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= HOPPER


def _launch_options(x: Tensor) -> dict[str, Any]:
    """Options of every kernel of a step: whether it is launched before the one before has ended."""
    return {"EARLY": True, "launch_pdl": True} if EARLY_LAUNCH and _can_launch_early(x.device) else {"EARLY": False}


@triton.jit
def _prefetch(start, size):
    """Fetch bytes into the L2 cache, without waiting for them; both are multiples of 16."""
    tl.inline_asm_elementwise(
        """{
        .reg .pred first;
        .reg .u32 thread;
        mov.u32 thread, %tid.x;
        setp.eq.u32 first, thread, 0;
        @first cp.async.bulk.prefetch.L2.global [$1], $2;
        mov.u32 $0, 0;
        }""",
        "=r,l,r",
        [start.to(tl.int64), size.to(tl.int32)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def _wait_for_last_kernel():
    """Wait for the kernel before, of whose output nothing may be read earlier, and let the next one be launched."""
    tl.extra.cuda.gdc_wait()
    tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def _prefetch_rows(weight, first, count, height, width):
    """Fetch some rows of a matrix of `height` rows, as many as there are."""
    own = weight + first.to(tl.int64) * width
    count = tl.minimum(height - first, count)
    size = count * width * (weight.dtype.element_ty.primitive_bitwidth // 8)
    if (own.to(tl.int64) | size) % 16 == 0:
        _prefetch(own, size)


@triton.jit
def _embed(embeddings, ids, position, h, squares, width, BLOCK: tl.constexpr, EARLY: tl.constexpr):
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
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
    options = _launch_options(h) | {"launch_pdl": False}  # the first kernel of a step starts after the step before
    _embed[(len(h),)](
        embeddings, ids, position, h, squares, h.shape[1], block, num_warps=min(max(block // 512, 1), 16), **options
    )


@triton.jit
def _add_norm(h, delta, weight, out, width, eps, ADDS: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr):
    if EARLY:
        _wait_for_last_kernel()
    row = tl.program_id(0).to(tl.int64) * width
    at = tl.arange(0, BLOCK)
    valid = at < width
    x = tl.load(h + row + at, valid, other=0.0)
    if ADDS:
        x = (x.to(tl.float32) + tl.load(delta + row + at, valid, other=0.0).to(tl.float32)).to(h.dtype.element_ty)
        tl.store(h + row + at, x, valid)
    exact = x.to(tl.float32)
    scale = 1 / tl.sqrt_rn(tl.sum(exact * exact) / width + eps)
    # Rounds where the norm of the network rounds.
    normed = (exact * scale).to(h.dtype.element_ty).to(tl.float32) * tl.load(weight + at, valid, other=0.0).to(
        tl.float32
    )
    tl.store(out + row + at, normed.to(out.dtype.element_ty), valid)


def add_norm(h: Tensor, delta: Tensor | None, weight: Tensor, out: Tensor, eps: float) -> None:
    """Add `delta` to the residual stream [R, D] and write its RMS norm."""
    block = triton.next_power_of_2(h.shape[1])
    warps = min(max(block // 512, 1), 16)
    _add_norm[(len(h),)](
        h, h if delta is None else delta, weight, out, h.shape[1], eps, delta is not None, block,
        num_warps=warps, **_launch_options(h),
    )  # fmt: skip


@triton.jit
def _gate(both, out, width, BLOCK: tl.constexpr, EARLY: tl.constexpr):
    if EARLY:
        _wait_for_last_kernel()
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    valid = at < width
    first = tl.load(both + row * 2 * width + at, valid, other=0.0).to(tl.float32)
    value = tl.load(both + row * 2 * width + width + at, valid, other=0.0).to(tl.float32)
    rounded = (first / (1 + tl.exp(-first))).to(both.dtype.element_ty).to(tl.float32)
    tl.store(out + row * width + at, (rounded * value).to(out.dtype.element_ty), valid)


def gate(both: Tensor, out: Tensor) -> None:
    """silu(first half) * second half of [R, 2 F]."""
    _gate[(len(out), triton.cdiv(out.shape[1], 1024))](
        both, out, out.shape[1], 1024, num_warps=4, **_launch_options(both)
    )


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
def _rms_scales(squares, row, rows, width, eps, GROUPS: tl.constexpr):
    """1 / RMS of some rows, from the sums of squares of their groups of channels."""
    count, group = tl.cdiv(width, GROUP), tl.arange(0, GROUPS)
    sums = _load_inputs(squares, row, rows, group, count)
    return 1 / tl.sqrt_rn(tl.sum(sums, 1) / width + eps)


@triton.jit
def _normalize(x, scales, norm, out: tl.constexpr):
    """Rows times their scales and the norm's weight, rounded where the network rounds."""
    rounded = (x.to(tl.float32) * scales[:, None]).to(x.dtype).to(tl.float32)
    return (rounded * norm.to(tl.float32)[None, :]).to(out)


@triton.jit(do_not_specialize=["rows"])
def _gated_linear(
    x, weight, scale, out, norm, squares, rows, width, hidden, eps,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEEP: tl.constexpr, STAGES: tl.constexpr, AHEAD: tl.constexpr,
    EXACT: tl.constexpr, SCALED: tl.constexpr, GROUPS: tl.constexpr, PREFETCH: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    other = weight + hidden.to(tl.int64) * width
    kind: tl.constexpr = out.dtype.element_ty
    rounding: tl.constexpr = "ieee" if EXACT else "tf32"
    if PREFETCH:
        _prefetch_rows(weight, tl.program_id(0) * COLUMNS, COLUMNS, hidden, width)
        _prefetch_rows(other, tl.program_id(0) * COLUMNS, COLUMNS, hidden, width)
    if AHEAD > 0:
        ahead = tl.arange(0, AHEAD)
        first_weights = _load_weights(weight, column, hidden, ahead, width)
        second_weights = _load_weights(other, column, hidden, ahead, width)
        if GROUPS > 0:
            ahead_norm = tl.load(norm + ahead, ahead < width, other=0.0)
    if EARLY:
        _wait_for_last_kernel()
    if AHEAD > 0:
        ahead_given = _load_inputs(x, row, rows, ahead, width)
    if GROUPS > 0:
        scales = _rms_scales(squares, row, rows, width, eps, GROUPS)
    deep = tl.arange(0, DEEP)
    first, second = tl.zeros([ROWS, COLUMNS], tl.float32), tl.zeros([ROWS, COLUMNS], tl.float32)
    for at in tl.range(AHEAD, width, DEEP, num_stages=STAGES):
        given = _load_inputs(x, row, rows, at + deep, width)
        if GROUPS > 0:
            given = _normalize(given, scales, tl.load(norm + at + deep, at + deep < width, other=0.0), kind)
        # 8-bit numbers become 16-bit ones without rounding.
        numbers = _load_weights(weight, column, hidden, at + deep, width).to(kind)
        first = tl.dot(given, numbers, first, input_precision=rounding)
        numbers = _load_weights(other, column, hidden, at + deep, width).to(kind)
        second = tl.dot(given, numbers, second, input_precision=rounding)
    if AHEAD > 0:
        if GROUPS > 0:
            ahead_given = _normalize(ahead_given, scales, ahead_norm, kind)
        first = tl.dot(ahead_given, first_weights.to(kind), first, input_precision=rounding)
        second = tl.dot(ahead_given, second_weights.to(kind), second, input_precision=rounding)
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
        rows, columns, deep, stages, _ahead(x, rows) // 2, out.dtype == torch.float32, scale is not None,
        _groups(norm), num_warps=warps, **_weight_options(x, weight),
    )  # fmt: skip


@triton.jit(do_not_specialize=["rows"])
def _linear(
    x, weight, scale, out, norm, squares, rows, width, height, eps,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEEP: tl.constexpr, STAGES: tl.constexpr, AHEAD: tl.constexpr,
    EXACT: tl.constexpr, SCALED: tl.constexpr, GROUPS: tl.constexpr, ADDS: tl.constexpr, PREFETCH: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    own = out + row[:, None] * height + column[None, :]
    inside = (row < rows)[:, None] & (column < height)[None, :]
    kind: tl.constexpr = x.dtype.element_ty if ADDS else out.dtype.element_ty  # of the product
    rounding: tl.constexpr = "ieee" if EXACT else "tf32"
    if PREFETCH:
        _prefetch_rows(weight, tl.program_id(0) * COLUMNS, COLUMNS, height, width)
    if AHEAD > 0:
        ahead = tl.arange(0, AHEAD)
        ahead_weights = _load_weights(weight, column, height, ahead, width)
        if GROUPS > 0:
            ahead_norm = tl.load(norm + ahead, ahead < width, other=0.0)
    if EARLY:
        _wait_for_last_kernel()
    if AHEAD > 0:
        ahead_given = _load_inputs(x, row, rows, ahead, width)
    if ADDS:
        residual = tl.load(own, inside, other=0.0)
    if GROUPS > 0:
        scales = _rms_scales(squares, row, rows, width, eps, GROUPS)
    deep = tl.arange(0, DEEP)
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for at in tl.range(AHEAD, width, DEEP, num_stages=STAGES):
        given = _load_inputs(x, row, rows, at + deep, width)
        if GROUPS > 0:
            given = _normalize(given, scales, tl.load(norm + at + deep, at + deep < width, other=0.0), kind)
        # 8-bit numbers become 16-bit ones without rounding.
        numbers = _load_weights(weight, column, height, at + deep, width).to(kind)
        total = tl.dot(given, numbers, total, input_precision=rounding)
    if AHEAD > 0:
        if GROUPS > 0:
            ahead_given = _normalize(ahead_given, scales, ahead_norm, kind)
        total = tl.dot(ahead_given, ahead_weights.to(kind), total, input_precision=rounding)
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
        norm.eps if norm else 0.0, rows, columns, deep, stages, _ahead(x, rows), exact, scale is not None,
        _groups(norm), squares is not None, num_warps=warps, **_weight_options(x, weight),
    )  # fmt: skip


def _operands(
    weight: Tensor, out: Tensor, scale: Tensor | None, norm: InputNorm | None, squares: Tensor | None = None
) -> tuple[Tensor, ...]:
    """Scale, output, norm and sums of squares of a product; where there is none, another tensor, which is not read."""
    scale = weight if scale is None else scale
    if norm is not None:
        return scale, out, norm.weight, norm.squares
    return scale, out, weight, weight if squares is None else squares


def _ahead(x: Tensor, rows: int) -> int:
    """Numbers of each row of a matrix that are loaded before the input is ready; none for many rows."""
    return WEIGHTS_AHEAD if rows <= 32 else 0


def _groups(norm: InputNorm | None) -> int:
    """The number of sums of squares of a row, as a power of 2; 0 if the input is not normalized."""
    return 0 if norm is None else triton.next_power_of_2(norm.squares.shape[1])


def _weight_options(x: Tensor, weight: Tensor) -> dict[str, Any]:
    options = _launch_options(x)
    return options | {"PREFETCH": options["EARLY"] and weight.nbytes <= PREFETCH_BYTES}


@triton.jit
def _rotate(row, first, cosine, sine, at, valid):
    """One head of a row with its pairs of channels rotated, rounded as it would be in memory."""
    x = tl.load(row + first + at, valid, other=0.0)
    other = tl.load(row + first + (at ^ 1), valid, other=0.0).to(tl.float32)
    return (x.to(tl.float32) * cosine + other * sine).to(x.dtype).to(tl.float32)


@triton.jit
def _online_softmax(maximum, total, mixed, score, value):
    """Add one score and value to the running softmax of every slot."""
    new_maximum = tl.maximum(maximum, score)
    decay, weight = tl.exp(maximum - new_maximum), tl.exp(score - new_maximum)
    return new_maximum, total * decay + weight, mixed * decay[:, None] + weight[:, None] * value.to(tl.float32)


@triton.jit
def _score(key, q, scale, read, now, prefix_mask, prefix, MASKED: tl.constexpr):
    """Scores of some positions, -inf for those that are not attended to."""
    seen = read < now
    if MASKED:
        seen = seen & (tl.load(prefix_mask + read, read < prefix, other=1) != 0)
    return tl.where(seen, tl.sum(key.to(tl.float32) * q[None, :], 1) * scale, float("-inf"))


@triton.jit(do_not_specialize=["layer", "cache_rows"])
def _attend(
    qkv, cache, prefix_mask, factors, position, out,
    layer, cache_rows, room, positions, prefix, scale,
    HEADS: tl.constexpr, KV: tl.constexpr, HEAD: tl.constexpr, STRIDE: tl.constexpr, MASKED: tl.constexpr,
    AT: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr, AHEAD: tl.constexpr, PREFETCH: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    group: tl.constexpr = HEADS // KV
    own = head // group
    # `embed` has written it, and has ended before the kernel before this one could pass its wait.
    now = tl.load(position, cache_modifier=".cg")
    at, slot = tl.arange(0, AT), tl.arange(0, BLOCK)
    valid = at < HEAD
    keys = cache + (layer * 2 * cache_rows + row * KV + own) * room * STRIDE
    values = keys + cache_rows.to(tl.int64) * room * STRIDE
    prefix_mask += row * prefix
    if PREFETCH:
        size = now * (STRIDE * (cache.dtype.element_ty.primitive_bitwidth // 8))
        _prefetch(keys, size)
        _prefetch(values, size)
    inside = (slot < now)[:, None] & (at < STRIDE)[None, :]
    tile = slot[:, None] * STRIDE + at[None, :]
    if AHEAD > 0:  # steps before have written them
        first_keys, first_values = tl.load(keys + tile, inside, other=0.0), tl.load(values + tile, inside, other=0.0)
    if EARLY:
        _wait_for_last_kernel()
    cosine = tl.load(factors + now * HEAD + at, valid, other=0.0)
    sine = tl.load(factors + (positions + now) * HEAD + at, valid, other=0.0)
    start = qkv + row * ((HEADS + 2 * KV) * HEAD)
    v = tl.load(start + (HEADS + KV + own) * HEAD + at, valid, other=0.0)
    q = _rotate(start, head * HEAD, cosine, sine, at, valid)
    k = _rotate(start, (HEADS + own) * HEAD, cosine, sine, at, valid)
    # Every slot of a tile keeps its own running softmax, so that warps do not wait for each other in the loop.
    maximum = tl.full([BLOCK], -1e30, tl.float32)  # finite, because a slot may see nothing
    total, mixed = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK, AT], tl.float32)
    for first in tl.range(AHEAD, now, BLOCK, num_stages=STAGES):
        read = first + slot
        inside = (read < now)[:, None] & (at < STRIDE)[None, :]
        key = tl.load(keys + first * STRIDE + tile, inside, other=0.0)
        value = tl.load(values + first * STRIDE + tile, inside, other=0.0)
        score = _score(key, q, scale, read, now, prefix_mask, prefix, MASKED)
        maximum, total, mixed = _online_softmax(maximum, total, mixed, score, value)
    if AHEAD > 0:
        score = _score(first_keys, q, scale, slot, now, prefix_mask, prefix, MASKED)
        maximum, total, mixed = _online_softmax(maximum, total, mixed, score, first_values)
    if head % group == 0:
        tl.store(keys + now * STRIDE + at, k.to(cache.dtype.element_ty), at < STRIDE)
        tl.store(values + now * STRIDE + at, v.to(cache.dtype.element_ty), at < STRIDE)
    score = tl.sum(q * k) * scale  # of the new position
    largest = tl.maximum(tl.max(maximum), score)
    decay, weight = tl.exp(maximum - largest), tl.exp(score - largest)
    result = tl.sum(mixed * decay[:, None], 0) + weight * v.to(tl.float32)
    result = result / (tl.sum(total * decay) + weight)
    tl.store(out + (row * HEADS + head) * HEAD + at, result.to(out.dtype.element_ty), valid)


def attend(
    qkv: Tensor,
    cache: Tensor,
    layer: int,
    prefix_mask: Tensor | None,
    factors: Tensor,
    position: Tensor,
    out: Tensor,
    heads: int,
) -> None:
    """Rotate queries and keys of one new position, store keys and values, and attend to all positions so far: [R, D].

    The cache is [depth, 2, rows, kv heads, room, stride], of which the first R rows are used.
    """
    _, _, cache_rows, kv, room, stride = cache.shape
    head = qkv.shape[1] // (heads + 2 * kv)
    wide = triton.next_power_of_2(stride)
    block = max(TILE // wide, 16)
    options = _launch_options(qkv)
    options["PREFETCH"] = options["EARLY"] and cache[0].nbytes <= CACHE_PREFETCH_BYTES
    # With TILE and WARPS as above, a thread holds 32 elements of the keys, of the values and of the sums.
    _attend[(len(qkv), heads)](
        qkv, cache, qkv if prefix_mask is None else prefix_mask, factors, position, out,
        layer, cache_rows * kv, room, factors.shape[1], 0 if prefix_mask is None else prefix_mask.shape[1], head**-0.5,
        heads, kv, head, stride, prefix_mask is not None, wide, block, STAGES, block if CACHE_AHEAD else 0,
        num_warps=WARPS, **options,
    )  # fmt: skip


@triton.jit
def _order(x):
    """Unsigned integers of the same order as the numbers."""
    bits = x.to(tl.uint32, bitcast=True)
    return tl.where(bits >> 31 != 0, bits ^ 0xFFFFFFFF, bits | 0x80000000)


@triton.jit
def _from_order(order):
    """The numbers of which `_order` made the integers."""
    bits = tl.where(order >> 31 != 0, order ^ 0x80000000, order ^ 0xFFFFFFFF)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _fourth_root(count):
    return tl.sqrt(tl.sqrt(count.to(tl.float32)))


@triton.jit
def _among_top(x, minimum, maximum, codes, TOP: tl.constexpr):
    """Whether each number is at least the k-th largest one.

    A bound is searched for until exactly k numbers reach it, or no other bound is left because of equal numbers.
    Fourth roots of the counts are nearly linear in the bound for logits, so that about 10 counts are enough.
    """
    order = _order(x)
    low, high = _order(minimum), _order(maximum) + 1
    reach_low, reach_high, step = codes + 0, codes - codes, codes - codes
    wanted = _fourth_root(step + TOP)
    while (high - low > 1) & (reach_low != TOP):
        number, share = _from_order(low), _fourth_root(reach_low)
        share = (share - wanted) / (share - _fourth_root(reach_high))
        guess = _order(number + (_from_order(high) - number) * share)
        # Halving the interval now and then limits the number of steps, whatever the numbers are.
        guess = tl.where((step & 3 == 3) | (step > 24), low + ((high - low) >> 1), guess)
        guess = tl.minimum(tl.maximum(guess, low + 1), high - 1)
        reach = tl.sum((order >= guess).to(tl.int32))
        enough = reach >= TOP
        low, high = tl.where(enough, guess, low), tl.where(enough, high, guess)
        reach_low, reach_high = tl.where(enough, reach, reach_low), tl.where(enough, reach_high, reach)
        step += 1
    return order >= low


@triton.jit
def _sample(
    logits, uniform, ids, log_prob, last, position,
    rows, codes, length, prefix, scale, temperature,
    TOP: tl.constexpr, GUIDED: tl.constexpr, RESCALE: tl.constexpr, BOTH: tl.constexpr, BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    if EARLY:
        _wait_for_last_kernel()
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    valid = at < codes
    x = tl.load(logits + row * codes + at, valid, other=0.0).to(tl.float32)
    if GUIDED:
        without = tl.load(logits + (rows + row) * codes + at, valid, other=0.0).to(tl.float32)
        guided = without + scale * (x - without)
        if RESCALE:
            guided = guided * (tl.sqrt_rn(tl.sum(x * x)) / tl.maximum(tl.sqrt_rn(tl.sum(guided * guided)), 1e-12))
        x = guided
    x = tl.where(valid, x / temperature, float("-inf"))
    maximum = tl.max(x)
    probability = tl.exp(x - maximum)
    normalizer = tl.sum(probability)
    if TOP > 0:
        minimum = tl.min(tl.where(valid, x, float("inf")))
        probability = tl.where(_among_top(x, minimum, maximum, codes, TOP), probability, 0.0)
    cumulative = tl.cumsum(probability)
    index = tl.load(position) - prefix + 1
    target = tl.load(uniform + row * length + index) * tl.sum(probability)
    above = (cumulative > target) & (probability > 0)
    token = tl.min(tl.where(above, at, BLOCK))
    token = tl.where(token < BLOCK, token, tl.max(tl.where(probability > 0, at, 0)))
    logit = tl.sum(tl.where(at == token, x, 0.0))
    tl.store(ids + row * length + index, token.to(tl.int64))
    tl.store(log_prob + row * length + index, logit - maximum - tl.log(normalizer))
    tl.store(last + row, token.to(tl.int64))
    if BOTH:
        tl.store(last + rows + row, token.to(tl.int64))


def sample(
    logits: Tensor, uniform: Tensor, ids: Tensor, log_prob: Tensor, last: Tensor, position: Tensor,
    *, prefix: int, scale: float | None, rescale: bool, temperature: float, top_k: int,
) -> None:  # fmt: skip
    """Sample the next token of every sequence by its uniform number, from guided logits if `scale` is given."""
    (rows, length), codes = uniform.shape, logits.shape[1]
    top = top_k if 0 < top_k < codes else 0
    block = triton.next_power_of_2(codes)
    _sample[(rows,)](
        logits, uniform, ids, log_prob, last, position,
        rows, codes, length, prefix, 1.0 if scale is None else scale, temperature,
        top, scale is not None, rescale, len(last) > rows, block,
        num_warps=min(max(block // 512, 1), 32), **_launch_options(logits),
    )  # fmt: skip
