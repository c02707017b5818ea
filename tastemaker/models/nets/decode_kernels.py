"""Triton kernels of a decoding step (norm, products of few rows, attention, sampling); usable inside CUDA graphs.

The module implements `cuda_graph_decoder.DecodeKernels`. Triton comes with PyTorch for GPUs.

A step is a chain of short kernels. On Hopper and newer GPUs each of them is launched while the one before still runs
(programmatic dependent launch): it starts to fetch its weights into the L2 cache, which no kernel of the chain writes,
and waits for the end of the one before only then.
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

MAX_SAMPLED_CODES = 32768  # largest codebook that one program samples from
MAX_LINEAR_ROWS = 32  # most rows for which `linear` and `gated_linear` are faster than products by cuBLAS
STAGES, TILE, WARPS = 3, 4096, 4  # of attention: tiles of keys in flight, elements per tile, warps per program
HOPPER = (9, 0)  # the first GPUs with programmatic dependent launch


@cache
def _has_early_launch(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= HOPPER


def _launch_options(x: Tensor) -> dict[str, Any]:
    """Options of every kernel of a step: whether it is launched before the one before has ended."""
    return {"EARLY": True, "launch_pdl": True} if _has_early_launch(x.device) else {"EARLY": False}


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


@triton.jit(do_not_specialize=["rows"])
def _gated_linear(
    x, weight, scale, out, rows, width, hidden,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEEP: tl.constexpr, STAGES: tl.constexpr, EXACT: tl.constexpr,
    SCALED: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    if EARLY:
        _prefetch_rows(weight, tl.program_id(0) * COLUMNS, COLUMNS, hidden, width)
        _prefetch_rows(weight, hidden + tl.program_id(0) * COLUMNS, COLUMNS, 2 * hidden, width)
        _wait_for_last_kernel()
    deep = tl.arange(0, DEEP)
    first, second = tl.zeros([ROWS, COLUMNS], tl.float32), tl.zeros([ROWS, COLUMNS], tl.float32)
    rounding: tl.constexpr = "ieee" if EXACT else "tf32"
    for at in tl.range(0, width, DEEP, num_stages=STAGES):
        valid = (at + deep) < width
        given = tl.load(
            x + row[:, None] * width + at + deep[None, :], (row < rows)[:, None] & valid[None, :], other=0.0
        )
        own = weight + column[None, :].to(tl.int64) * width + at + deep[:, None]
        inside = (column < hidden)[None, :] & valid[:, None]
        # 8-bit numbers become 16-bit ones without rounding.
        first = tl.dot(given, tl.load(own, inside, other=0.0).to(given.dtype), first, input_precision=rounding)
        own += hidden.to(tl.int64) * width
        second = tl.dot(given, tl.load(own, inside, other=0.0).to(given.dtype), second, input_precision=rounding)
    if SCALED:
        first *= tl.load(scale + column, column < hidden, other=0.0)[None, :]
        second *= tl.load(scale + hidden + column, column < hidden, other=0.0)[None, :]
    # Rounds where the products and the gate of the network round.
    first = first.to(out.dtype.element_ty).to(tl.float32)
    gate = (first / (1 + tl.exp(-first))).to(out.dtype.element_ty).to(tl.float32)
    result = gate * second.to(out.dtype.element_ty).to(tl.float32)
    inside = (row < rows)[:, None] & (column < hidden)[None, :]
    tl.store(out + row[:, None] * hidden + column[None, :], result.to(out.dtype.element_ty), inside)


def gated_linear(
    x: Tensor, weight: Tensor, out: Tensor, columns: int = 0, deep: int = 128, stages: int = 4,
    *, scale: Tensor | None = None,
) -> None:  # fmt: skip
    """silu(x w1) * (x w3) of x [R, D], with w1 above w3 in one matrix [2 F, D]; for few rows.

    With a `scale` per row of the matrix [2 F, 1], its numbers have 8 bits.
    """
    columns = columns or (16 if out.shape[1] <= 4096 else 32)  # enough programs for all multiprocessors
    rows, exact = triton.next_power_of_2(max(min(len(x), 64), 16)), x.dtype == torch.float32
    grid = triton.cdiv(out.shape[1], columns), triton.cdiv(len(x), rows)
    _gated_linear[grid](
        x, weight, weight if scale is None else scale, out, len(x), x.shape[1], out.shape[1],
        rows, columns, deep, stages, exact, scale is not None, num_warps=4, **_launch_options(x),
    )  # fmt: skip


@triton.jit(do_not_specialize=["rows"])
def _linear(
    x, weight, scale, out, rows, width, height,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEEP: tl.constexpr, STAGES: tl.constexpr, EXACT: tl.constexpr,
    SCALED: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    if EARLY:
        _prefetch_rows(weight, tl.program_id(0) * COLUMNS, COLUMNS, height, width)
        _wait_for_last_kernel()
    deep = tl.arange(0, DEEP)
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    rounding: tl.constexpr = "ieee" if EXACT else "tf32"
    for at in tl.range(0, width, DEEP, num_stages=STAGES):
        valid = (at + deep) < width
        given = tl.load(
            x + row[:, None] * width + at + deep[None, :], (row < rows)[:, None] & valid[None, :], other=0.0
        )
        own = weight + column[None, :].to(tl.int64) * width + at + deep[:, None]
        numbers = tl.load(own, (column < height)[None, :] & valid[:, None], other=0.0)
        # 8-bit numbers become 16-bit ones without rounding.
        total = tl.dot(given, numbers.to(given.dtype), total, input_precision=rounding)
    if SCALED:
        total *= tl.load(scale + column, column < height, other=0.0)[None, :]
    inside = (row < rows)[:, None] & (column < height)[None, :]
    tl.store(out + row[:, None] * height + column[None, :], total.to(out.dtype.element_ty), inside)


def linear(
    x: Tensor, weight: Tensor, out: Tensor, columns: int = 0, deep: int = 0, stages: int = 4,
    *, scale: Tensor | None = None,
) -> None:  # fmt: skip
    """x W^T of x [R, K] and W [M, K]; sums are fp32.

    With a `scale` per row of the matrix [M, 1], its numbers have 8 bits.
    """
    columns = columns or (16 if len(weight) <= 4096 else 32)  # enough programs for all multiprocessors
    rows = triton.next_power_of_2(max(min(len(x), 128), 16))
    deep = deep or (256 if rows <= 32 else 128)  # enough bytes on their way, in the shared memory that there is
    stages = stages if rows <= 64 else min(stages, 2)
    grid = triton.cdiv(len(weight), columns), triton.cdiv(len(x), rows)
    _linear[grid](
        x, weight, weight if scale is None else scale, out, len(x), x.shape[1], len(weight),
        rows, columns, deep, stages, x.dtype == torch.float32, scale is not None, num_warps=4, **_launch_options(x),
    )  # fmt: skip


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
    return new_maximum, total * decay + weight, mixed * decay[:, None] + weight[:, None] * value


@triton.jit(do_not_specialize=["layer", "cache_rows"])
def _attend(
    qkv, cache, prefix_mask, factors, position, out,
    layer, cache_rows, room, positions, prefix, scale,
    HEADS: tl.constexpr, KV: tl.constexpr, HEAD: tl.constexpr, STRIDE: tl.constexpr, MASKED: tl.constexpr,
    AT: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    group: tl.constexpr = HEADS // KV
    own = head // group
    now = tl.load(position)  # which the step before has written
    at = tl.arange(0, AT)
    valid = at < HEAD
    keys = cache + (layer * 2 * cache_rows + row * KV + own) * room * STRIDE
    values = keys + cache_rows.to(tl.int64) * room * STRIDE
    if EARLY:
        size = now * (STRIDE * (cache.dtype.element_ty.primitive_bitwidth // 8))
        _prefetch(keys, size)
        _prefetch(values, size)
        _wait_for_last_kernel()
    cosine = tl.load(factors + now * HEAD + at, valid, other=0.0)
    sine = tl.load(factors + (positions + now) * HEAD + at, valid, other=0.0)
    start = qkv + row * ((HEADS + 2 * KV) * HEAD)
    q = _rotate(start, head * HEAD, cosine, sine, at, valid)
    k = _rotate(start, (HEADS + own) * HEAD, cosine, sine, at, valid)
    v = tl.load(start + (HEADS + KV + own) * HEAD + at, valid, other=0.0)
    if head % group == 0:
        tl.store(keys + now * STRIDE + at, k.to(cache.dtype.element_ty), at < STRIDE)
        tl.store(values + now * STRIDE + at, v.to(cache.dtype.element_ty), at < STRIDE)
    # Every slot of a tile keeps its own running softmax, so that warps do not wait for each other in the loop.
    slot = tl.arange(0, BLOCK)
    maximum = tl.zeros([BLOCK], tl.float32) + tl.sum(q * k) * scale
    total = tl.where(slot == 0, 1.0, 0.0)
    mixed = tl.where(slot[:, None] == 0, v.to(tl.float32)[None, :], 0.0)
    for first in tl.range(0, now, BLOCK, num_stages=STAGES):
        read = first + slot
        inside = (read < now)[:, None] & (at < STRIDE)[None, :]
        past = tl.load(keys + read[:, None] * STRIDE + at[None, :], inside, other=0.0)
        value = tl.load(values + read[:, None] * STRIDE + at[None, :], inside, other=0.0)
        score = tl.sum(past.to(tl.float32) * q[None, :], 1) * scale
        seen = read < now
        if MASKED:
            seen = seen & (tl.load(prefix_mask + row * prefix + read, read < prefix, other=1) != 0)
        score = tl.where(seen, score, float("-inf"))
        maximum, total, mixed = _online_softmax(maximum, total, mixed, score, value.to(tl.float32))
    decay = tl.exp(maximum - tl.max(maximum))
    result = tl.sum(mixed * decay[:, None], 0) / tl.sum(total * decay)
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
    # With TILE and WARPS as above, a thread holds 32 elements of the keys, of the values and of the sums.
    _attend[(len(qkv), heads)](
        qkv, cache, qkv if prefix_mask is None else prefix_mask, factors, position, out,
        layer, cache_rows * kv, room, factors.shape[1], 0 if prefix_mask is None else prefix_mask.shape[1], head**-0.5,
        heads, kv, head, stride, prefix_mask is not None, wide, max(TILE // wide, 16), STAGES,
        num_warps=WARPS, **_launch_options(qkv),
    )  # fmt: skip


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
        # Map floats to unsigned integers of the same order, and find the k-th largest bit by bit.
        bits = x.to(tl.uint32, bitcast=True)
        order = tl.where(bits >> 31 != 0, bits ^ 0xFFFFFFFF, bits | 0x80000000)
        bound, bit = tl.full([], 0, tl.uint32), tl.full([], 0x80000000, tl.uint32)
        for _ in range(32):
            candidate = bound | bit
            bound = tl.where(tl.sum((order >= candidate).to(tl.int32)) >= TOP, candidate, bound)
            bit = bit >> 1
        probability = tl.where(order >= bound, probability, 0.0)
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
