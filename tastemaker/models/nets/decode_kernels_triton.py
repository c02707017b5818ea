"""Triton kernels of a decoding step (norm, gate, attention, sampling); usable inside CUDA graphs.

Triton comes with PyTorch for GPUs; `philox` and `train.grouping` are the other files that import it.
"""
# mypy: ignore-errors
# Triton's language is not Python to a type checker: pointers are added to, and every number may be a tensor.

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

WIDEST = 32768  # codes that one program can choose of
FEW = 32  # rows up to which `opened` is worth it
STAGES, TILE, WARPS = 3, 4096, 4  # tiles of keys on their way at once, numbers in one, warps that share them


@triton.jit
def _add_norm(h, delta, weight, out, width, eps, ADDS: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * width
    at = tl.arange(0, BLOCK)
    there = at < width
    x = tl.load(h + row + at, there, other=0.0)
    if ADDS:
        x = (x.to(tl.float32) + tl.load(delta + row + at, there, other=0.0).to(tl.float32)).to(h.dtype.element_ty)
        tl.store(h + row + at, x, there)
    exact = x.to(tl.float32)
    scale = 1 / tl.sqrt_rn(tl.sum(exact * exact) / width + eps)
    # Rounded where the network's own norm rounds.
    normed = (exact * scale).to(h.dtype.element_ty).to(tl.float32) * tl.load(weight + at, there, other=0.0).to(
        tl.float32
    )
    tl.store(out + row + at, normed.to(out.dtype.element_ty), there)


def add_norm(h: Tensor, delta: Tensor | None, weight: Tensor, out: Tensor, eps: float) -> None:
    """Add what a half of a block gave to the stream [R, D], and write its norm."""
    block = triton.next_power_of_2(h.shape[1])
    warps = min(max(block // 512, 1), 16)
    _add_norm[(len(h),)](
        h, h if delta is None else delta, weight, out, h.shape[1], eps, delta is not None, block, num_warps=warps
    )


@triton.jit
def _gate(both, out, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    there = at < width
    opened = tl.load(both + row * 2 * width + at, there, other=0.0).to(tl.float32)
    value = tl.load(both + row * 2 * width + width + at, there, other=0.0).to(tl.float32)
    rounded = (opened / (1 + tl.exp(-opened))).to(both.dtype.element_ty).to(tl.float32)
    tl.store(out + row * width + at, (rounded * value).to(out.dtype.element_ty), there)


def gate(both: Tensor, out: Tensor) -> None:
    """silu(first half) * second half of [R, 2 F]."""
    _gate[(len(out), triton.cdiv(out.shape[1], 1024))](both, out, out.shape[1], 1024, num_warps=4)


@triton.jit(do_not_specialize=["rows"])
def _opened(
    x, weight, out, rows, width, hidden,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEEP: tl.constexpr, STAGES: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    deep = tl.arange(0, DEEP)
    first, second = tl.zeros([ROWS, COLUMNS], tl.float32), tl.zeros([ROWS, COLUMNS], tl.float32)
    rounding: tl.constexpr = "ieee" if EXACT else "tf32"
    for at in tl.range(0, width, DEEP, num_stages=STAGES):
        there = (at + deep) < width
        given = tl.load(
            x + row[:, None] * width + at + deep[None, :], (row < rows)[:, None] & there[None, :], other=0.0
        )
        own = weight + column[None, :].to(tl.int64) * width + at + deep[:, None]
        inside = (column < hidden)[None, :] & there[:, None]
        first = tl.dot(given, tl.load(own, inside, other=0.0), first, input_precision=rounding)
        own += hidden.to(tl.int64) * width
        second = tl.dot(given, tl.load(own, inside, other=0.0), second, input_precision=rounding)
    # Rounded where the network's own products and gate round.
    first = first.to(out.dtype.element_ty).to(tl.float32)
    gate = (first / (1 + tl.exp(-first))).to(out.dtype.element_ty).to(tl.float32)
    found = gate * second.to(out.dtype.element_ty).to(tl.float32)
    inside = (row < rows)[:, None] & (column < hidden)[None, :]
    tl.store(out + row[:, None] * hidden + column[None, :], found.to(out.dtype.element_ty), inside)


def opened(x: Tensor, weight: Tensor, out: Tensor, columns: int = 0, deep: int = 128, stages: int = 4) -> None:
    """silu(x w1) * (x w3) of [R, D] by the two in one [2 F, D], read once: for few rows."""
    columns = columns or (16 if out.shape[1] <= 4096 else 32)  # so that no processor is left out
    rows, exact = triton.next_power_of_2(max(min(len(x), 64), 16)), x.dtype == torch.float32
    grid = triton.cdiv(out.shape[1], columns), triton.cdiv(len(x), rows)
    _opened[grid](
        x, weight, out, len(x), x.shape[1], out.shape[1], rows, columns, deep, stages, exact, num_warps=4
    )  # fmt: skip


@triton.jit
def _turned(row, first, cosine, sine, at, there):
    """One head of a row, its pairs of channels turned, rounded as it would be in memory."""
    x = tl.load(row + first + at, there, other=0.0)
    other = tl.load(row + first + (at ^ 1), there, other=0.0).to(tl.float32)
    return (x.to(tl.float32) * cosine + other * sine).to(x.dtype).to(tl.float32)


@triton.jit
def _weighed(most, total, mixed, score, told):
    """One more score and value for every slot's softmax."""
    higher = tl.maximum(most, score)
    fade, share = tl.exp(most - higher), tl.exp(score - higher)
    return higher, total * fade + share, mixed * fade[:, None] + share[:, None] * told


@triton.jit(do_not_specialize=["layer", "kept"])
def _attend(
    qkv, cache, shown, factors, place, out,
    layer, kept, room, places, prefix, scale,
    HEADS: tl.constexpr, KV: tl.constexpr, HEAD: tl.constexpr, STRIDE: tl.constexpr, HIDES: tl.constexpr,
    AT: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    group: tl.constexpr = HEADS // KV
    own = head // group
    now = tl.load(place)
    at = tl.arange(0, AT)
    there = at < HEAD
    cosine = tl.load(factors + now * HEAD + at, there, other=0.0)
    sine = tl.load(factors + (places + now) * HEAD + at, there, other=0.0)
    start = qkv + row * ((HEADS + 2 * KV) * HEAD)
    q = _turned(start, head * HEAD, cosine, sine, at, there)
    k = _turned(start, (HEADS + own) * HEAD, cosine, sine, at, there)
    v = tl.load(start + (HEADS + KV + own) * HEAD + at, there, other=0.0)
    keys = cache + (layer * 2 * kept + row * KV + own) * room * STRIDE
    values = keys + kept.to(tl.int64) * room * STRIDE
    if head % group == 0:
        tl.store(keys + now * STRIDE + at, k.to(cache.dtype.element_ty), at < STRIDE)
        tl.store(values + now * STRIDE + at, v.to(cache.dtype.element_ty), at < STRIDE)
    # Every slot of a tile keeps a softmax of its own until the end: warps need not wait for each other in the loop.
    slot = tl.arange(0, BLOCK)
    most = tl.zeros([BLOCK], tl.float32) + tl.sum(q * k) * scale
    total = tl.where(slot == 0, 1.0, 0.0)
    mixed = tl.where(slot[:, None] == 0, v.to(tl.float32)[None, :], 0.0)
    for first in tl.range(0, now, BLOCK, num_stages=STAGES):
        read = first + slot
        inside = (read < now)[:, None] & (at < STRIDE)[None, :]
        past = tl.load(keys + read[:, None] * STRIDE + at[None, :], inside, other=0.0)
        told = tl.load(values + read[:, None] * STRIDE + at[None, :], inside, other=0.0)
        score = tl.sum(past.to(tl.float32) * q[None, :], 1) * scale
        seen = read < now
        if HIDES:
            seen = seen & (tl.load(shown + row * prefix + read, read < prefix, other=1) != 0)
        score = tl.where(seen, score, float("-inf"))
        most, total, mixed = _weighed(most, total, mixed, score, told.to(tl.float32))
    fade = tl.exp(most - tl.max(most))
    found = tl.sum(mixed * fade[:, None], 0) / tl.sum(total * fade)
    tl.store(out + (row * HEADS + head) * HEAD + at, found.to(out.dtype.element_ty), there)


def attend(
    qkv: Tensor,
    cache: Tensor,
    layer: int,
    shown: Tensor | None,
    factors: Tensor,
    place: Tensor,
    out: Tensor,
    heads: int,
) -> None:
    """Turn queries and keys of one new place, keep its keys and values, and attend to all that was read: [R, D].

    The cache is [depth, 2, rows, kv heads, room, stride]; of its rows the first R are used, of their room what is read.
    """
    _, _, kept, kv, room, stride = cache.shape
    head = qkv.shape[1] // (heads + 2 * kv)
    wide = triton.next_power_of_2(stride)
    # As given, a thread holds 32 keys of a tile, as many values, and as many sums.
    _attend[(len(qkv), heads)](
        qkv, cache, qkv if shown is None else shown, factors, place, out,
        layer, kept * kv, room, factors.shape[1], 0 if shown is None else shown.shape[1], head**-0.5,
        heads, kv, head, stride, shown is not None, wide, max(TILE // wide, 16), STAGES, num_warps=WARPS,
    )  # fmt: skip


@triton.jit
def _choose(
    logits, uniform, ids, log_prob, last, place,
    rows, codes, length, prefix, scale, temperature,
    TOP: tl.constexpr, GUIDED: tl.constexpr, RESCALED: tl.constexpr, BOTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    there = at < codes
    x = tl.load(logits + row * codes + at, there, other=0.0).to(tl.float32)
    if GUIDED:
        without = tl.load(logits + (rows + row) * codes + at, there, other=0.0).to(tl.float32)
        guided = without + scale * (x - without)
        if RESCALED:
            guided = guided * (tl.sqrt_rn(tl.sum(x * x)) / tl.maximum(tl.sqrt_rn(tl.sum(guided * guided)), 1e-12))
        x = guided
    x = tl.where(there, x / temperature, float("-inf"))
    most = tl.max(x)
    share = tl.exp(x - most)
    everything = tl.sum(share)
    if TOP > 0:
        # Floats in the order of unsigned integers; the k-th largest is found bit by bit.
        bits = x.to(tl.uint32, bitcast=True)
        order = tl.where(bits >> 31 != 0, bits ^ 0xFFFFFFFF, bits | 0x80000000)
        bound, bit = tl.full([], 0, tl.uint32), tl.full([], 0x80000000, tl.uint32)
        for _ in range(32):
            higher = bound | bit
            bound = tl.where(tl.sum((order >= higher).to(tl.int32)) >= TOP, higher, bound)
            bit = bit >> 1
        share = tl.where(order >= bound, share, 0.0)
    passed = tl.cumsum(share)
    written = tl.load(place) - prefix + 1
    target = tl.load(uniform + row * length + written) * tl.sum(share)
    fits = (passed > target) & (share > 0)
    token = tl.min(tl.where(fits, at, BLOCK))
    token = tl.where(token < BLOCK, token, tl.max(tl.where(share > 0, at, 0)))
    chosen = tl.sum(tl.where(at == token, x, 0.0))
    tl.store(ids + row * length + written, token.to(tl.int64))
    tl.store(log_prob + row * length + written, chosen - most - tl.log(everything))
    tl.store(last + row, token.to(tl.int64))
    if BOTH:
        tl.store(last + rows + row, token.to(tl.int64))


def choose(
    logits: Tensor, uniform: Tensor, ids: Tensor, log_prob: Tensor, last: Tensor, place: Tensor,
    *, prefix: int, scale: float | None, rescaled: bool, temperature: float, top_k: int,
) -> None:  # fmt: skip
    """The next token of every row by its uniform number, of guided logits where there is a scale."""
    (rows, length), codes = uniform.shape, logits.shape[1]
    top = top_k if 0 < top_k < codes else 0
    block = triton.next_power_of_2(codes)
    _choose[(rows,)](
        logits, uniform, ids, log_prob, last, place,
        rows, codes, length, prefix, 1.0 if scale is None else scale, temperature,
        top, scale is not None, rescaled, len(last) > rows, block, num_warps=min(max(block // 512, 1), 32),
    )  # fmt: skip
