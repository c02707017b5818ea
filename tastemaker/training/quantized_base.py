"""Frozen weights in 8 bits below adapters: half the memory of bf16, expanded layer by layer where they are used.

Only the 8-bit numbers and a scale per output row are kept, also for the backward pass. Inputs, adapters and gradients
keep the precision of the run. With `engine.rollout_precision` rollouts multiply the 8-bit numbers themselves.
"""

from __future__ import annotations

import warnings

import torch
from torch import nn

from ..core.quantization import Kind, quantize_rows
from . import low_precision_linear
from .activation_memory import repeated_blocks
from .low_precision_linear import QuantizedLinear, is_large


def large_linear_layers(net: nn.Module) -> list[nn.Linear]:
    """Return the large linear layers of the blocks that may compute in 8 bits: all but those of adapters."""
    layers: list[nn.Linear] = []
    for block in repeated_blocks(net):
        for name, module in block.named_modules():
            # Frozen adapters are snapshots of the live one, which trains in the precision of the run.
            is_adapter = any(part.startswith("lora_") for part in name.split("."))
            if type(module) in (nn.Linear, QuantizedLinear) and not is_adapter:
                assert isinstance(module, nn.Linear)
                layers += [module] if is_large(module.weight) else []
    return layers


def warn_of_small_layers(net: nn.Module, setting: str) -> None:
    """Warn if no linear layer of a network is large enough for a setting of its precision."""
    if large_linear_layers(net):
        return
    modules = [module for block in repeated_blocks(net) for module in block.modules()]
    sizes = [module.weight.numel() for module in modules if isinstance(module, nn.Linear)]
    limit, alignment = low_precision_linear.MIN_WEIGHTS, low_precision_linear.ALIGNMENT
    warnings.warn(
        f"{setting} changes nothing: it is for linear layers of at least {limit} weights with sides that are "
        f"multiples of {alignment}, and the largest of {len(sizes)} in the blocks of this network has "
        f"{max(sizes, default=0)}; remove it [TM2681]",
        stacklevel=3,
    )


@torch.no_grad()
def quantize_frozen_layers(net: nn.Module, kind: Kind, device: torch.device | None = None) -> list[nn.Linear]:
    """Keep the weights of the large frozen linear layers of the blocks in 8 bits; return these layers.

    Weights are replaced one after the other, so that the memory for two copies of the network is never needed. With a
    `device` they are rounded and kept there, which need not have room for the whole network in full precision.
    """
    layers = [layer for layer in large_linear_layers(net) if not layer.weight.requires_grad]
    for layer in layers:
        numbers, scale = quantize_rows(layer.weight.detach().to(device or layer.weight.device), kind)
        layer.weight = nn.Parameter(numbers, requires_grad=False)
        layer.register_buffer("weight_scale", scale, persistent=False)
        layer.__class__ = QuantizedLinear  # in place, so that parameter names stay the same
    return layers
