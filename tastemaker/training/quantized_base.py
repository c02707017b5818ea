"""Frozen weights in 8 bits below adapters: half the memory of bf16, expanded layer by layer where they are used.

Only the 8-bit numbers and a scale per output row are kept, also for the backward pass. Inputs, adapters and gradients
keep the precision of the run. With `engine.rollout_precision` rollouts multiply the 8-bit numbers themselves.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .activation_memory import repeated_blocks
from .rollout_precision import Kind, is_large, quantize_rows


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


def expand(weight: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the weight [M, K] of 8-bit numbers with a scale per row [M, 1]."""
    return weight.to(dtype) * scale.to(dtype)


class QuantizedLinear:
    """The forward method of a linear layer whose frozen weight is kept in 8 bits."""

    def __init__(self, layer: nn.Linear, kind: Kind) -> None:
        numbers, scale = quantize_rows(layer.weight.detach(), kind)
        layer.weight = nn.Parameter(numbers, requires_grad=False)
        layer.register_buffer("weight_scale", scale, persistent=False)
        self.layer = layer

    def __call__(self, x: Tensor) -> Tensor:
        device, bias = x.device.type, self.layer.bias
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype
        with torch.autocast(device, enabled=False):
            out: Tensor = ExpandedLinear.apply(  # type: ignore[no-untyped-call]
                x.to(dtype), self.layer.weight, self.layer.weight_scale, None if bias is None else bias.to(dtype)
            )
        return out


@torch.no_grad()
def quantize_frozen_layers(net: nn.Module, kind: Kind) -> list[nn.Linear]:
    """Keep the weights of the large frozen linear layers of the blocks in 8 bits; return these layers.

    Weights are replaced one after the other, so that the memory for two copies of the network is never needed.
    """
    modules = [module for block in repeated_blocks(net) for module in block.modules()]
    layers = [m for m in modules if type(m) is nn.Linear and is_large(m.weight) and not m.weight.requires_grad]
    for layer in layers:
        layer.forward = QuantizedLinear(layer, kind)  # type: ignore[assignment, method-assign]  # names stay the same
    return layers
