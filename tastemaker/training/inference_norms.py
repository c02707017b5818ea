"""Fewer and shorter kernels during inference: normalization layers stay in the autocast dtype instead of float32,
and convolution weights are stored in channels_last order."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from ..core.weights import NetworkTraits
from .precision import cast_weights

MEMORY_FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}
CHANNEL_DIM = {4: 1, 5: 2}  # of images [B, C, H, W] and videos [B, F, C, H, W]


class InputDtypeNorms(TorchFunctionMode):
    """Run normalization layers in the dtype of their input, where autocast would copy it to float32 and back.

    The kernels accumulate in float32 anyway; only the rounding of their outputs differs.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        named = kwargs or {}
        kinds: dict[Any, Callable[..., Tensor]] = {
            functional.group_norm: group_norm_in_dtype,
            functional.layer_norm: layer_norm_in_dtype,
        }
        if func not in kinds or not torch.is_autocast_enabled(args[0].device.type):
            return func(*args, **named)
        with torch.autocast(args[0].device.type, enabled=False):
            return kinds[func](*args, **named)


def group_norm_in_dtype(
    x: Tensor, num_groups: int, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> Tensor:
    """Group norm in the dtype of x, with the Triton kernel for channels_last inputs."""
    weight, bias = (None if p is None else p.to(x.dtype) for p in (weight, bias))
    if weight is None or bias is None or not is_channels_last(x):
        return functional.group_norm(x, num_groups, weight, bias, eps)
    from .triton_group_norm import triton_group_norm

    normalized: Tensor = triton_group_norm(x, num_groups, weight, bias, eps)
    return normalized


def is_channels_last(x: Tensor) -> bool:
    """Return whether x [B, C, ...] is channels_last on a GPU with Triton."""
    memory_format = MEMORY_FORMATS.get(x.ndim)
    if memory_format is None or x.device.type != "cuda" or find_spec("triton") is None:
        return False
    return x.is_contiguous(memory_format=memory_format) and not x.is_contiguous()


def layer_norm_in_dtype(
    x: Tensor, normalized_shape: Any, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> Tensor:
    """Layer norm in the dtype of x."""
    weight, bias = (None if p is None else p.to(x.dtype) for p in (weight, bias))
    return functional.layer_norm(x, normalized_shape, weight, bias, eps)


class PreserveChannelsLast(TorchFunctionMode):
    """Keep channels_last tensors in their order where `contiguous` would copy them to channels-first."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is not torch.Tensor.contiguous or len(args) > 1 or kwargs:
            return func(*args, **(kwargs or {}))
        x: Tensor = args[0]
        channel = CHANNEL_DIM.get(x.ndim)
        if channel is None or x.stride(channel) != 1 or x.is_contiguous():
            return x.contiguous()
        return x.movedim(channel, -1).contiguous().movedim(-1, channel)


def convert_to_channels_last(net: nn.Module, traits: NetworkTraits) -> None:
    """Store frozen convolution weights in channels_last order, which the outputs of convolutions then follow."""
    for module in net.modules() if traits.channels_last else ():
        if isinstance(module, nn.Conv2d | nn.Conv3d) and not module.weight.requires_grad:
            module.weight.data = module.weight.data.contiguous(memory_format=MEMORY_FORMATS[module.weight.ndim])


def use_inference_norms(net: nn.Module, dtype: torch.dtype, traits: NetworkTraits = NetworkTraits()) -> None:
    """Wrap `net.forward` so that calls without gradient use inference norms and weights cast all at once."""
    forward = net.forward

    def call(*inputs: Any, **named: Any) -> Any:
        if torch.is_grad_enabled():
            return forward(*inputs, **named)
        with (
            InputDtypeNorms(),
            PreserveChannelsLast() if traits.channels_last else nullcontext(),
            cast_weights(net, dtype),
        ):
            return forward(*inputs, **named)

    net.forward = call  # in place, so that parameter names stay the same
