"""Attention with heads wider than fused kernels take, as in the decoders of image generators: one head of 512 channels.

PyTorch's memory-efficient kernel is fast for such a head, but its gradient is not: 16 of the 119 ms that FLUX's
decoder took with its gradient, at 720x720 on an H200. Here it is computed with matrix products, some queries at a time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

if TYPE_CHECKING:
    from diffusers.models.attention_processor import Attention

MAX_FUSED_HEAD = 256  # channels of a head, in the kernels whose gradients are fast
MAX_SCORES = 1 << 25  # of queries and keys, at once: 128 MiB in float32


class _WideHeadAttention(torch.autograd.Function):
    """Attention of q, k, v [B, heads, N, D] without mask."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = F.scaled_dot_product_attention(q, k, v)
        ctx.save_for_backward(q, k, v, out)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        saved = ctx.saved_tensors  # read once, because activation checkpointing computes them on the first access
        q, k, v, out = (x.flatten(0, 1) for x in saved)
        grad = grads[0].to(q.dtype).flatten(0, 1)
        q_grad, k_grad, v_grad = torch.empty_like(q), *(torch.zeros_like(x, dtype=torch.float32) for x in (k, v))
        scale = q.shape[-1] ** -0.5
        mean = (grad.float() * out.float()).sum(-1, keepdim=True)  # of the scores' gradient, by their probabilities
        count = max(1, MAX_SCORES // (len(q) * k.shape[1]))
        for start in range(0, q.shape[1], count):
            part = slice(start, start + count)
            probability = _product(q[:, part], k.mT).mul_(scale).softmax(-1)
            scores_grad = _product(grad[:, part], v.mT).sub_(mean[:, part]).mul_(probability).mul_(scale).to(q.dtype)
            q_grad[:, part] = scores_grad @ k
            k_grad += _product(scores_grad.mT, q[:, part])
            v_grad += _product(probability.to(q.dtype).mT, grad[:, part])
        results = (q_grad, k_grad.to(k.dtype), v_grad.to(v.dtype))
        first, second, third = (x.view_as(like) for x, like in zip(results, saved[:3], strict=True))
        return first, second, third


def _product(a: Tensor, b: Tensor) -> Tensor:
    """Batched matrix product of low-precision factors with a float32 result."""
    if a.device.type == "cuda" and a.dtype != torch.float32:
        product: Tensor = torch.bmm(a, b, out_dtype=torch.float32)
        return product
    return a.float() @ b.float()


def wide_head_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Scaled dot-product attention [B, heads, N, D] without mask, with a fast gradient for wide heads."""
    out: Tensor = _WideHeadAttention.apply(q, k, v)  # type: ignore[no-untyped-call]
    return out


class _WideHeads(TorchFunctionMode):
    """Replaces attention of wide heads without mask where a gradient is needed."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        named = kwargs or {}
        plain = len(args) == 3 and not any(named.get(name) for name in ("dropout_p", "is_causal", "scale"))
        if func is not F.scaled_dot_product_attention or not plain or named.get("attn_mask") is not None:
            return func(*args, **named)
        is_wide = args[0].shape[-1] > MAX_FUSED_HEAD and torch.is_grad_enabled() and args[0].requires_grad
        return wide_head_attention(*args) if is_wide else func(*args, **named)


class WideHeadProcessor:
    """A processor of diffusers around another one, whose attention it computes."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __call__(
        self,
        attn: Attention,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        temb: Tensor | None = None,  # diffusers passes what the signature names
    ) -> Tensor:
        with _WideHeads():
            out: Tensor = self.inner(attn, hidden_states, encoder_hidden_states, attention_mask, temb)
        return out


def use_wide_head_attention(net: nn.Module) -> None:
    """Let attention layers of diffusers with wide heads use the faster gradient."""
    from diffusers.models.attention_processor import Attention  # a large library, which loading a network has imported

    for module in net.modules():
        if isinstance(module, Attention) and module.inner_dim // module.heads > MAX_FUSED_HEAD:
            module.set_processor(WideHeadProcessor(module.processor))  # type: ignore[arg-type]
