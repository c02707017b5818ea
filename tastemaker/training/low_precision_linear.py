"""Linear layers with weights in 8 bits and a scale per row, of a frozen base and for rollouts, or in bf16 for these.

A layer becomes one of them by assigning its class, so that parameters keep their names. What a layer computes depends
on its class and buffers only: torch.compile shares one graph between equal blocks. GPUs multiply FP8 or int8; other
devices round to the same numbers and multiply in the dtype of the run, which shows what the rounding does, but is
slower.
"""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..core.quantization import expand, kind_of, quantize_rows
from ..core.rollout_scope import ROLLOUTS

RolloutKind = Literal["bf16", "fp8", "int8"]
MIN_WEIGHTS = 1 << 16  # smaller layers gain nothing
MIN_TOKENS = 17  # of a sample; the kernel for int8 needs more than 16 rows
ALIGNMENT = 16  # of both sides of a weight, which the kernels need


def is_large(weight: Tensor) -> bool:
    return weight.numel() >= MIN_WEIGHTS and all(side % ALIGNMENT == 0 for side in weight.shape)


def linear_8bit(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
    """x W^T + b for x [..., K] rounded to 8 bits, and W [M, K] in 8 bits with a scale per row [M, 1]."""
    dtype = compute_dtype(x)
    rows, row_scale = quantize_rows(x.reshape(-1, x.shape[-1]), kind_of(weight))
    if x.device.type == "cuda" and weight.dtype == torch.float8_e4m3fn:
        # bf16 is the only result of the kernel for scales per row, and has to be the dtype of the bias too.
        product = torch._scaled_mm(
            rows,
            weight.t(),
            row_scale,
            scale.t(),
            bias=None if bias is None else bias.to(torch.bfloat16),
            out_dtype=torch.bfloat16,
            use_fast_accum=True,
        ).to(dtype)
    else:
        if x.device.type == "cuda":
            product = multiply_int8(rows, row_scale, weight, scale).to(dtype)
        else:
            product = expand(rows, row_scale, dtype) @ expand(weight, scale, dtype).t()
        product = product if bias is None else product + bias.to(dtype)
    return product.view(*x.shape[:-1], -1)


def multiply_int8(rows: Tensor, row_scale: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    """Multiply int8 numbers [N, K] and [M, K] as integers, with a scale for each of their rows: [N, M] in fp32."""
    return torch._int_mm(rows, weight.t()).float() * row_scale * scale.t()


def linear_bf16(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x W^T + b in bf16 for W [M, K] in bf16, in the dtype that the layer computes in otherwise."""
    with torch.autocast(x.device.type, enabled=False):
        out = F.linear(x.bfloat16(), weight, None if bias is None else bias.bfloat16())
    return out.to(compute_dtype(x))


def compute_dtype(x: Tensor) -> torch.dtype:
    """The dtype that a linear layer computes in."""
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype


def computes_in_fewer_bits(x: Tensor) -> bool:
    """Whether a layer's call with this input [B, ..., K] belongs to a rollout and gains from fewer bits.

    The number of samples B has no say, so that samples do not depend on the size of their batch.
    """
    # The cheapest condition first: compiled graphs with gradients do not depend on the others.
    return not torch.is_grad_enabled() and ROLLOUTS.active and math.prod(x.shape[1:-1]) >= MIN_TOKENS


class RolloutLinear(nn.Linear):
    """A linear layer that multiplies a copy of its weight in fewer bits in rollouts; see `rollout_precision`."""

    rollout_weight: Tensor | None  # [M, K], made before the first rollout
    rollout_scale: Tensor | None  # [M, 1]; none of bf16

    def forward(self, x: Tensor) -> Tensor:
        if not computes_in_fewer_bits(x):
            return super().forward(x)
        assert self.rollout_weight is not None
        if self.rollout_scale is None:
            return linear_bf16(x, self.rollout_weight, self.bias)
        return linear_8bit(x, self.rollout_weight, self.rollout_scale, self.bias)


class ExpandedLinear(torch.autograd.Function):
    """x W^T + b for a frozen W in 8 bits. The backward pass expands W again instead of keeping it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(weight, scale)
        return F.linear(x, expand(weight, scale, x.dtype), bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        weight, scale = ctx.saved_tensors
        return grad @ expand(weight, scale, grad.dtype), None, None, None


class QuantizedLinear(nn.Linear):
    """A linear layer whose frozen weight is kept in 8 bits, and expanded where it is used."""

    weight_scale: Tensor  # [M, 1]

    def forward(self, x: Tensor) -> Tensor:
        dtype, bias = compute_dtype(x), self.bias
        with torch.autocast(x.device.type, enabled=False):
            out: Tensor = ExpandedLinear.apply(  # type: ignore[no-untyped-call]
                x.to(dtype), self.weight, self.weight_scale, None if bias is None else bias.to(dtype)
            )
        return out


class QuantizedRolloutLinear(QuantizedLinear):
    """A linear layer whose frozen weight is kept in 8 bits, which rollouts multiply as they are."""

    def forward(self, x: Tensor) -> Tensor:
        if not computes_in_fewer_bits(x):
            return super().forward(x)
        return linear_8bit(x, self.weight, self.weight_scale, self.bias)
