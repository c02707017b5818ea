"""PyTorch versions of the decoding kernels, for machines without Triton and for tests.

Places are on the device, so that a graph can be made of it, which costs attending to all room there is, read or not.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .gpt import apply_rotary_emb

WIDEST, FEW = 0, 0  # codes to choose of and rows to open in one go: neither is any faster here


def add_norm(h: Tensor, delta: Tensor | None, weight: Tensor, out: Tensor, eps: float) -> None:
    """Add what a half of a block gave to the stream [R, D], and write its norm."""
    if delta is not None:
        h.add_(delta)
    out.copy_(F.rms_norm(h.float(), h.shape[-1:], eps=eps).to(h.dtype) * weight)


def gate(both: Tensor, out: Tensor) -> None:
    """silu(first half) * second half of [R, 2 F]."""
    first, second = both.chunk(2, 1)
    torch.mul(F.silu(first), second, out=out)


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
    """Turn queries and keys of one new place, keep its keys and values, and attend to all that was read: [R, D]."""
    rows, (_, _, _, kv, room, _) = len(qkv), cache.shape
    head = qkv.shape[1] // (heads + 2 * kv)
    now = place.long()
    parts = qkv.view(rows, 1, heads + 2 * kv, head)
    turned = apply_rotary_emb(parts[:, :, : heads + kv], factors[:, now])
    q, k = (part.transpose(1, 2) for part in turned.tensor_split([heads], 2))
    own = cache[layer, :, :rows, :, :, :head]
    own.index_copy_(3, now, torch.stack([k, parts[:, :, heads + kv :].transpose(1, 2)]).to(cache.dtype))
    seen = torch.arange(room, device=qkv.device) <= now
    if shown is not None:
        seen = seen & F.pad(shown[:rows].bool(), (0, room - shown.shape[1]), value=True)[:, None, None]
    mixed = F.scaled_dot_product_attention(q, own[0], own[1], seen.expand(rows, 1, 1, room), enable_gqa=heads != kv)
    out.copy_(mixed.transpose(1, 2).reshape(rows, -1))
