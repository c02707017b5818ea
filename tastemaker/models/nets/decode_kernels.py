"""Triton kernels of a decoding step (norm, products of few rows, attention, sampling); usable inside CUDA graphs.

The module implements `cuda_graph_decoder.DecodeKernels`; its products are those of `decode_products`. Triton comes with
PyTorch for GPUs.
"""
# mypy: ignore-errors
# Kernels are not Python to a type checker: pointers are added to, and every number may be a tensor.

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from .decode_products import add_linear, embed, gated_linear, linear

__all__ = ["MAX_FUSED_ROWS", "MAX_GATED_ROWS", "MAX_SAMPLED_CODES", "add_linear", "add_norm", "attend", "embed"]
__all__ += ["gate", "gated_linear", "linear", "sample"]

MAX_SAMPLED_CODES = 32768  # largest codebook that one program samples from
MAX_GATED_ROWS = 32  # most rows for which `gated_linear` is faster than a product and `gate`
MAX_FUSED_ROWS = 16  # most rows for which norms and additions in products were measured, and are faster
STAGES, TILE, WARPS = 2, 4096, 4  # of attention: tiles of keys in flight, elements per tile, warps per program


@triton.jit
def _add_norm(h, delta, weight, out, width, eps, ADDS: tl.constexpr, BLOCK: tl.constexpr):
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
        h, h if delta is None else delta, weight, out, h.shape[1], eps, delta is not None, block, num_warps=warps
    )


@triton.jit
def _gate(both, out, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    valid = at < width
    first = tl.load(both + row * 2 * width + at, valid, other=0.0).to(tl.float32)
    value = tl.load(both + row * 2 * width + width + at, valid, other=0.0).to(tl.float32)
    rounded = (first / (1 + tl.exp(-first))).to(both.dtype.element_ty).to(tl.float32)
    tl.store(out + row * width + at, (rounded * value).to(out.dtype.element_ty), valid)


def gate(both: Tensor, out: Tensor) -> None:
    """silu(first half) * second half of [R, 2 F]."""
    _gate[(len(out), triton.cdiv(out.shape[1], 1024))](both, out, out.shape[1], 1024, num_warps=4)


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
    AT: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    group: tl.constexpr = HEADS // KV
    own = head // group
    now = tl.load(position)
    at, slot = tl.arange(0, AT), tl.arange(0, BLOCK)
    valid = at < HEAD
    keys = cache + (layer * 2 * cache_rows + row * KV + own) * room * STRIDE
    values = keys + cache_rows.to(tl.int64) * room * STRIDE
    prefix_mask += row * prefix
    tile = slot[:, None] * STRIDE + at[None, :]
    cosine = tl.load(factors + now * HEAD + at, valid, other=0.0)
    sine = tl.load(factors + (positions + now) * HEAD + at, valid, other=0.0)
    start = qkv + row * ((HEADS + 2 * KV) * HEAD)
    v = tl.load(start + (HEADS + KV + own) * HEAD + at, valid, other=0.0)
    q = _rotate(start, head * HEAD, cosine, sine, at, valid)
    k = _rotate(start, (HEADS + own) * HEAD, cosine, sine, at, valid)
    # Every slot of a tile keeps its own running softmax, so that warps do not wait for each other in the loop.
    maximum = tl.full([BLOCK], -1e30, tl.float32)  # finite, because a slot may see nothing
    total, mixed = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK, AT], tl.float32)
    for first in tl.range(0, now, BLOCK, num_stages=STAGES):
        read = first + slot
        inside = (read < now)[:, None] & (at < STRIDE)[None, :]
        key = tl.load(keys + first * STRIDE + tile, inside, other=0.0)
        value = tl.load(values + first * STRIDE + tile, inside, other=0.0)
        score = _score(key, q, scale, read, now, prefix_mask, prefix, MASKED)
        maximum, total, mixed = _online_softmax(maximum, total, mixed, score, value)
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
    # With TILE and WARPS as above, a thread holds 32 elements of the keys, of the values and of the sums.
    _attend[(len(qkv), heads)](
        qkv, cache, qkv if prefix_mask is None else prefix_mask, factors, position, out,
        layer, cache_rows * kv, room, factors.shape[1], 0 if prefix_mask is None else prefix_mask.shape[1], head**-0.5,
        heads, kv, head, stride, prefix_mask is not None, wide, max(TILE // wide, 16), STAGES, num_warps=WARPS,
    )  # fmt: skip


@triton.jit
def _sample(
    logits, uniform, ids, log_prob, last, position,
    rows, codes, length, prefix, scale, temperature,
    TOP: tl.constexpr, GUIDED: tl.constexpr, RESCALE: tl.constexpr, BOTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
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
        top, scale is not None, rescale, len(last) > rows, block, num_warps=min(max(block // 512, 1), 32),
    )  # fmt: skip
