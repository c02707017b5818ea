"""CUDA graphs for calls without gradient, captured once for each input shape and then replayed.

A rollout calls the network many times on equal shapes. Of a small one, or one with adapters, a call is thousands of
short kernels, which a host launches more slowly than a GPU computes them; played again they are one launch.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

MAX_GRAPHS = 16  # recordings of a network: each holds memory, and whoever comes with ever new shapes gains nothing
PLAIN_TYPES = (bool, int, float, str, type(None))
CaptureFn = Callable[[Callable[[], Any]], tuple[Any, Callable[[], None]]]


@dataclass(frozen=True)
class CapturedGraph:
    """A call that was recorded."""

    inputs: list[Tensor]  # where it reads
    made: Any  # where it writes
    play: Callable[[], None]


@dataclass(eq=False)
class CudaGraphForward:
    """Replace `net.forward`: the first call of a shape runs eagerly, the second is captured, later ones replay."""

    net: nn.Module
    forward: Callable[..., Any]
    alike: Callable[[], str | None]  # what the network runs on now; none where no two calls are alike
    record: CaptureFn
    takes: dict[Hashable, CapturedGraph | None] = field(default_factory=dict)
    broken: bool = False

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        flat, form = tree_flatten((inputs, named))
        key = self._key(flat, form)
        if key is None or self.broken:
            return self.forward(*inputs, **named)
        if key not in self.takes:
            if len(self.takes) < MAX_GRAPHS:
                self.takes[key] = None
            return self.forward(*inputs, **named)  # which also chooses kernels and asks for memory
        take = self.takes[key] or self._recorded(flat, form)
        if take is None:
            return self.forward(*inputs, **named)
        self.takes[key] = take
        tensors = [x for x in flat if isinstance(x, Tensor)]
        for held, x in zip(take.inputs, tensors, strict=True):
            held.copy_(x)
        take.play()
        return tree_map(lambda x: x.clone() if isinstance(x, Tensor) else x, take.made)

    def _key(self, flat: list[Any], form: Any) -> Hashable | None:
        """All that a recording is for; none where one would be wrong."""
        state = self.alike()
        if state is None or torch.is_grad_enabled() or torch.compiler.is_compiling() or _is_capturing():
            return None
        held = [*self.net.parameters(), *self.net.buffers()]
        device = held[0].device
        if any(x.device != device if isinstance(x, Tensor) else not isinstance(x, PLAIN_TYPES) for x in flat):
            return None
        kinds = tuple((x.shape, x.stride(), x.dtype) if isinstance(x, Tensor) else (type(x), x) for x in flat)
        cast = torch.is_autocast_enabled(device.type) and torch.get_autocast_dtype(device.type)
        # A recording reads memory, wherever the weights that were there may be by now.
        places = hash(tuple(x.data_ptr() for x in held))
        return state, str(form), kinds, cast, self.net.training, places

    def _recorded(self, flat: list[Any], form: Any) -> CapturedGraph | None:
        held = [x.clone() if isinstance(x, Tensor) else x for x in flat]
        inputs, named = tree_unflatten(held, form)
        try:
            made, play = self.record(lambda: self.forward(*inputs, **named))
        except RuntimeError as error:
            self.broken = True
            why = str(error).splitlines()[0]
            told = f"calls of this network cannot be recorded ({why:.200}), so each is launched as without it"
            warnings.warn(f"engine.graphs: {told}", stacklevel=2)
            return None
        return CapturedGraph([x for x in held if isinstance(x, Tensor)], made, play)


def _is_capturing() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def make_capture() -> CaptureFn:
    """Recordings that share their memory, for only one plays at a time and what it made is copied."""
    pool = torch.cuda.graph_pool_handle()

    def record(work: Callable[[], Any]) -> tuple[Any, Callable[[], None]]:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):
            made = work()
        return made, graph.replay

    return record


def use_cuda_graphs(net: nn.Module, alike: Callable[[], str | None], record: CaptureFn) -> None:
    """In place, so that no name changes."""
    net.forward = CudaGraphForward(net, net.forward, alike, record)
