"""Rollouts in 8 bits: copies of the large linear layers with a scale per row, for calls without a gradient.

Inputs get a scale per row at every call. Weights are copied when they have changed, in one pass over them. GPUs
multiply in FP8 or int8; other devices round to the same numbers and multiply in the dtype of the run, which shows what
the rounding does, but is slower.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ..core.errors import TrainingError
from ..core.rollout_scope import ROLLOUTS
from .activation_memory import repeated_blocks

Kind = Literal["fp8", "int8"]
MIN_WEIGHTS = 1 << 16  # smaller layers gain nothing
MIN_ROWS = 32  # of an input; kernels for integers need more than 16, and fewer gain nothing
ALIGNMENT = 16  # of both sides of a weight, which the kernels need
FP8_CAPABILITY = (8, 9)  # Ada and Hopper
LARGEST = {"fp8": 448.0, "int8": 127.0}
DTYPES = {"fp8": torch.float8_e4m3fn, "int8": torch.int8}
SCALE_FLOOR = 1e-12  # of rows of zeros


def quantize_rows(x: Tensor, kind: Kind) -> tuple[Tensor, Tensor]:
    """Round x [N, K] to 8 bits; return the numbers and the scale of each row: [N, K], [N, 1]."""
    scale = x.abs().amax(-1, keepdim=True).float().clamp(min=SCALE_FLOOR) / LARGEST[kind]
    scaled = (x.float() / scale).clamp(-LARGEST[kind], LARGEST[kind])
    return (scaled.round() if kind == "int8" else scaled).to(DTYPES[kind]), scale


def multiply(x: Tensor, x_scale: Tensor, weight: Tensor, weight_scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Return x [N, K] times the transposed weight [M, K] of 8-bit numbers with a scale per row: [N, M]."""
    if x.device.type != "cuda":
        product = (x.float() * x_scale).to(dtype) @ (weight.float() * weight_scale).to(dtype).t()
    elif weight.dtype == torch.int8:
        product = (torch._int_mm(x, weight.t()).float() * x_scale * weight_scale.t()).to(dtype)
    else:
        half = dtype if dtype == torch.bfloat16 else torch.bfloat16  # the only result of the kernel for scales per row
        product = torch._scaled_mm(x, weight.t(), x_scale, weight_scale.t(), out_dtype=half, use_fast_accum=True)
    return product.to(dtype)


@dataclass(eq=False)
class LowPrecisionLinear:
    """The forward method of a linear layer whose calls in rollouts multiply in 8 bits."""

    layer: nn.Linear
    kind: Kind
    forward: Callable[[Tensor], Tensor]  # of the layer
    version: tuple[int, int] | None = None  # of the weight that the copy was made of
    weight: Tensor | None = None  # [M, K] in 8 bits
    scale: Tensor | None = None  # [M, 1]

    def __call__(self, x: Tensor) -> Tensor:
        if not ROLLOUTS.active or torch.is_grad_enabled() or x.numel() // x.shape[-1] < MIN_ROWS:
            return self.forward(x)
        assert self.weight is not None and self.scale is not None  # made before the first layer is called
        device = x.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype
        kind: Kind = "int8" if self.weight.dtype == torch.int8 else "fp8"
        rows, row_scale = quantize_rows(x.reshape(-1, x.shape[-1]), kind)
        product = multiply(rows, row_scale, self.weight, self.scale, dtype).view(*x.shape[:-1], -1)
        return product if self.layer.bias is None else product + self.layer.bias.to(dtype)

    @torch.no_grad()
    def refresh(self) -> None:
        """Copy the weight again if it has changed; the copy stays where it is."""
        version = (self.layer.weight._version, self.layer.weight.data_ptr())
        if version == self.version:
            return
        if self.layer.weight.dtype in DTYPES.values():  # `engine.base_precision`: no copy is needed
            self.weight, self.scale, self.version = self.layer.weight, self.layer.get_buffer("weight_scale"), version
            return
        weight, scale = quantize_rows(self.layer.weight, self.kind)
        if self.weight is None or self.scale is None or self.weight.device != weight.device:
            self.weight, self.scale = weight, scale
        else:
            self.weight.copy_(weight)
            self.scale.copy_(scale)
        self.version = version


def large_linear_layers(net: nn.Module) -> list[nn.Linear]:
    """Return the layers that rollouts compute in 8 bits: large ones of the blocks; with adapters, only frozen ones."""
    modules = [module for block in repeated_blocks(net) for module in block.modules()]
    linear = [module for module in modules if type(module) is nn.Linear and is_large(module.weight)]
    return [layer for layer in linear if not layer.weight.requires_grad] or linear


def is_large(weight: Tensor) -> bool:
    return weight.numel() >= MIN_WEIGHTS and all(side % ALIGNMENT == 0 for side in weight.shape)


def use_low_precision_rollouts(net: nn.Module, kind: Kind, device: torch.device) -> list[LowPrecisionLinear]:
    """Let the large linear layers of a network compute in 8 bits in rollouts; return their forward methods."""
    check_device(kind, device)
    layers = [LowPrecisionLinear(layer, kind, layer.forward) for layer in large_linear_layers(net)]
    for layer in layers:
        # In place, so that parameter names stay the same.
        layer.layer.forward = layer  # type: ignore[assignment, method-assign]

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def refresh(module: nn.Module, inputs: Any) -> None:
        if ROLLOUTS.active and not torch.is_grad_enabled():
            for layer in layers:
                layer.refresh()

    net.register_forward_pre_hook(refresh)
    return layers


def check_device(kind: Kind, device: torch.device) -> None:
    """Refuse FP8 on GPUs that cannot multiply it."""
    if kind == "fp8" and device.type == "cuda" and torch.cuda.get_device_capability(device) < FP8_CAPABILITY:
        found = ".".join(map(str, torch.cuda.get_device_capability(device)))
        raise TrainingError(
            f"engine.rollout_precision: fp8 needs a GPU of compute capability 8.9 or later (RTX 40, L40, H100), but "
            f"this one has {found}; set engine.rollout_precision to int8 or bf16 [TM2602]"
        )
