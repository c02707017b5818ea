"""Per-block torch.compile, activation checkpointing and activation offloading."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from ..core.weights import HasExtraForwardMethods
from .precision import recompute_contexts

MIN_PARAMETERS, MIN_BLOCKS = (
    100_000_000,
    8,
)  # weights, and blocks of one kind, from which blocks are compiled one by one
RECOMPILE_LIMIT = 64


def repeated_blocks(net: nn.Module) -> list[nn.Module]:
    """The elements of the outermost lists of modules: what a network repeats, and so what to shard and recompute by."""
    found: list[nn.Module] = []
    for child in net.children():
        if isinstance(child, nn.ModuleList):
            for element in child:
                # A list has no forward to hook into; its elements may.
                found += repeated_blocks(nn.ModuleList([element])) if isinstance(element, nn.ModuleList) else [element]
        else:
            found += repeated_blocks(child)
    return [block for block in found if any(True for _ in block.parameters())]


def should_compile_blocks(net: nn.Module) -> bool:
    """Whether a network is to be compiled block by block: it is large, and has many blocks of one kind.

    One graph then serves all of them, so that it takes seconds; a small network gains more from being compiled whole.
    """
    kinds = Counter(type(block) for block in repeated_blocks(net))
    large = sum(p.numel() for p in net.parameters()) >= MIN_PARAMETERS
    return large and max(kinds.values(), default=0) >= MIN_BLOCKS


def compile_blocks(net: nn.Module) -> None:
    """Compile each block by itself, before anything is wrapped around it; equal blocks share their graphs."""
    from torch._dynamo import config

    # A graph for each kind of block, number of rows, and whether there is a gradient; then no more is translated, and
    # what is left would run uncompiled.
    config.recompile_limit = max(config.recompile_limit, RECOMPILE_LIMIT)
    for module in repeated_blocks(net):
        # Fixed sizes: a second number of rows would otherwise make all sizes open, and slower.
        module.forward = torch.compile(module.forward, dynamic=False)


def compile_whole(net: nn.Module) -> None:
    """In place: names, hooks and borrowed weights stay as they are."""
    net.compile()
    for name in net.entries if isinstance(net, HasExtraForwardMethods) else ():
        setattr(net, name, torch.compile(getattr(net, name)))


def disable_compile_cache() -> None:
    """Reuse no graph of an earlier process: what is kept of them does not say which kernel of attention it calls."""
    from torch._functorch import config

    config.enable_autograd_cache = False


def checkpoint_activations(net: nn.Module) -> None:
    """Apply activation checkpointing to each block: recompute its activations in the backward pass."""
    for module in repeated_blocks(net) or [net]:
        module.forward = _checkpointed(module.forward)  # in place, so that no name changes


def _checkpointed(forward: Callable[..., Any]) -> Callable[..., Any]:
    def call(*inputs: Any, **named: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*inputs, **named)
        if torch.compiler.is_compiling():  # which takes no modes into the backward pass
            return checkpoint(forward, *inputs, use_reentrant=False, **named)
        return checkpoint(forward, *inputs, use_reentrant=False, context_fn=recompute_contexts, **named)

    return call


def offload_activations(device: torch.device) -> AbstractContextManager[Any]:
    """Offload activations saved for the backward pass to host memory; parameters stay on the device."""
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
