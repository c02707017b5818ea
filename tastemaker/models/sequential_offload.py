"""Sequential offload of frozen networks: in host memory, and on the device of the training layer by layer.

Large text encoders take more memory than what is left beside a network in training. Each of their layers is therefore
on the device during its own call only; what is used between layers, such as embeddings, during the whole call.

The group offloading of diffusers finds lists of layers only at the top of a network, not within the encoders of
transformers, and copies weights back to the host. Here nothing is copied back, and the network stays as it was.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

MIN_LAYERS_SHARE = 0.5  # of a network's bytes in its largest list of layers; below that it is moved as a whole


@contextmanager
def temporarily_on_device(net: nn.Module, device: torch.device) -> Iterator[None]:
    """Let a frozen CPU network compute on a device within the block."""
    layers = offloaded_layers(net)
    groups = [_Onloaded(_tensors_of(layer), device) for layer in layers]
    rest = _Onloaded(_tensors_of(net) - set().union(*(group.tensors for group in groups)), device)
    handles: list[Any] = []
    try:
        rest.onload()
        for layer, group in zip(layers, groups, strict=True):
            handles.append(layer.register_forward_pre_hook(group.onload))
            handles.append(layer.register_forward_hook(group.offload, always_call=True))
        yield
    finally:
        for handle in handles:
            handle.remove()
        for group in (*groups, rest):
            group.offload()


class _Onloaded:
    """Tensors that are on a device for a while; their data in host memory are kept."""

    def __init__(self, tensors: set[Tensor], device: torch.device) -> None:
        self.tensors, self.device = tensors, device
        self.host_data: dict[Tensor, Tensor] = {}

    def onload(self, *_: Any) -> None:
        for tensor in self.tensors:
            if tensor.device != self.device:
                self.host_data[tensor] = tensor.data
                tensor.data = tensor.data.to(self.device)

    def offload(self, *_: Any) -> None:
        """Take the data of the host again. What kernels still read is not overwritten before they have ended."""
        for tensor, data in self.host_data.items():
            tensor.data = data
        self.host_data = {}


def _tensors_of(module: nn.Module) -> set[Tensor]:
    return {*module.parameters(), *module.buffers()}


def offloaded_layers(net: nn.Module) -> list[nn.Module]:
    """The layers that are moved one at a time: the largest list of modules, if it holds most of the network.

    Layers that share weights with each other or with the rest of the network are moved with the rest.
    """
    lists = [module for module in net.modules() if isinstance(module, nn.ModuleList)]
    largest = max(lists, key=lambda module: _count_bytes(_tensors_of(module)), default=None)
    if largest is None or _count_bytes(_tensors_of(largest)) < MIN_LAYERS_SHARE * _count_bytes(_tensors_of(net)):
        return []
    inside = set(largest.modules())
    outside = set(chain.from_iterable(_direct_tensors(module) for module in net.modules() if module not in inside))
    layers, seen = list[nn.Module](), set[Tensor]()
    for layer in largest:
        tensors = _tensors_of(layer)
        if not tensors & (outside | seen):
            layers.append(layer)
        seen |= tensors
    return layers


def _direct_tensors(module: nn.Module) -> Iterator[Tensor]:
    yield from module.parameters(recurse=False)
    yield from module.buffers(recurse=False)


def _count_bytes(tensors: set[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def max_device_bytes(net: nn.Module) -> int:
    """Most bytes of a network that are on the device at once while it computes there."""
    own = [_tensors_of(layer) for layer in offloaded_layers(net)]
    return _count_bytes(_tensors_of(net) - set().union(*own)) + max(map(_count_bytes, own), default=0)
