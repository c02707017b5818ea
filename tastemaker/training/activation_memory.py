"""Per-block torch.compile, activation checkpointing and activation offloading."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from ..config.schema import EngineConfig
from ..core.weights import NetworkTraits
from .precision import recompute_contexts

# Networks with at least this many parameters and blocks of one class are compiled block by block.
MIN_PARAMETERS, MIN_BLOCKS = 100_000_000, 8
RECOMPILE_LIMIT = 64


def repeated_blocks(net: nn.Module) -> list[nn.Module]:
    """Return the elements of the outermost module lists: the units to shard, compile and checkpoint."""
    blocks: list[nn.Module] = []
    for child in net.children():
        if isinstance(child, nn.ModuleList):
            for element in child:
                # A list has no forward to wrap; its elements may.
                blocks += repeated_blocks(nn.ModuleList([element])) if isinstance(element, nn.ModuleList) else [element]
        else:
            blocks += repeated_blocks(child)
    return [block for block in blocks if any(True for _ in block.parameters())]


def should_compile_blocks(net: nn.Module) -> bool:
    """Return whether to compile a network block by block: it is large and has many blocks of one class.

    All blocks share one graph, which compiles in seconds; small networks are faster if compiled as a whole.
    """
    kinds = Counter(type(block) for block in repeated_blocks(net))
    large = sum(p.numel() for p in net.parameters()) >= MIN_PARAMETERS
    return large and max(kinds.values(), default=0) >= MIN_BLOCKS


def compile_blocks(net: nn.Module) -> None:
    """Compile each block by itself; blocks of one class share their graphs. Call this before other wrappers."""
    from torch._dynamo import config

    # There is a graph for each class of block, batch size and gradient mode. Beyond the limit, blocks run uncompiled.
    config.recompile_limit = max(config.recompile_limit, RECOMPILE_LIMIT)
    for module in repeated_blocks(net):
        # Static shapes: a second batch size would otherwise switch to dynamic shapes, which are slower.
        module.forward = torch.compile(module.forward, dynamic=False)


def compile_whole(net: nn.Module, traits: NetworkTraits = NetworkTraits()) -> None:
    """Compile a network and its other forward methods in place; names of parameters and hooks stay the same."""
    net.compile()
    for name in traits.extra_forward_methods:
        setattr(net, name, torch.compile(getattr(net, name)))


def disable_compile_cache() -> None:
    """Do not reuse compiled graphs of earlier processes: the cache key lacks the attention kernel."""
    from torch._functorch import config

    config.enable_autograd_cache = False


def checkpoint_units(net: nn.Module) -> list[nn.Module]:
    """Return the modules that are checkpointed one by one: the blocks, or the network if it has none."""
    return repeated_blocks(net) or [net]


def checkpoint_activations(net: nn.Module, count: int | None = None) -> None:
    """Apply activation checkpointing to the first `count` blocks, or to all: recompute them in the backward pass.

    The first blocks are the last of the backward pass, when the activations of all others are free again.
    """
    for module in checkpoint_units(net)[:count]:
        module.forward = _checkpointed(module.forward)  # in place, so that parameter names stay the same


def resolve_without_plan(config: EngineConfig, device: torch.device) -> EngineConfig:
    """Replace `activation_memory: auto` where the memory of the run is not estimated: on a GPU, save what is possible.

    Other devices keep activations: host memory is not the limit there.
    """
    if config.activation_memory != "auto":
        return config
    return replace(config, activation_memory="checkpoint" if device.type == "cuda" else "keep")


def _checkpointed(forward: Callable[..., Any]) -> Callable[..., Any]:
    def call(*inputs: Any, **named: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*inputs, **named)
        if torch.compiler.is_compiling():  # torch.compile does not support context_fn
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
