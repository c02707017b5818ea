"""Activations for the backward pass: kept, computed again, or kept on the host."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from .precision import again


def blocks(net: nn.Module) -> list[nn.Module]:
    """The elements of the outermost lists of modules: what a network repeats, and so what to shard and recompute by."""
    found: list[nn.Module] = []
    for child in net.children():
        if isinstance(child, nn.ModuleList):
            for element in child:
                # A list has no forward to hook into; its elements may.
                found += blocks(nn.ModuleList([element])) if isinstance(element, nn.ModuleList) else [element]
        else:
            found += blocks(child)
    return [block for block in found if any(True for _ in block.parameters())]


def recompute(net: nn.Module) -> None:
    """Forget the activations inside each block, and compute them again in the backward pass."""
    for module in blocks(net) or [net]:
        module.forward = _again(module.forward)  # in place, so that no name changes


def _again(forward: Callable[..., Any]) -> Callable[..., Any]:
    def call(*inputs: Any, **named: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*inputs, **named)
        return checkpoint(forward, *inputs, use_reentrant=False, context_fn=again, **named)

    return call


def offload(device: torch.device) -> AbstractContextManager[Any]:
    """Within the block activations saved for the backward pass wait in host memory; parameters stay where they are."""
    pin = device.type == "cuda"

    def pack(x: Tensor) -> Tensor | tuple[torch.device, Tensor]:
        if isinstance(x, nn.Parameter) or isinstance(x._base, nn.Parameter):
            return x
        host = torch.empty(x.size(), dtype=x.dtype, layout=x.layout, pin_memory=pin)
        host.copy_(x, non_blocking=pin)
        return x.device, host

    def unpack(packed: Tensor | tuple[torch.device, Tensor]) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        return packed[1].to(packed[0], non_blocking=pin)

    return saved_tensors_hooks(pack, unpack)
