"""CUDA graphs for calls without gradient, captured once for each input shape and then replayed.

A rollout calls the network many times with the same shapes. The thousands of short kernels of a small network, or of
one with LoRA, take longer to launch than to run; a captured graph is one launch.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

MAX_GRAPHS = 16  # per network: each holds memory, and inputs of ever new shapes gain nothing
PLAIN_TYPES = (bool, int, float, str, type(None))
CaptureFn = Callable[[Callable[[], Any]], tuple[Any, Callable[[], None]]]


@dataclass(frozen=True)
class CapturedGraph:
    """A captured call, with the memory it reads and writes."""

    inputs: list[Tensor]
    outputs: Any
    replay: Callable[[], None]


@dataclass(eq=False)
class CudaGraphForward:
    """Replace `net.forward`: the first call of a shape runs eagerly, the second is captured, later ones replay."""

    net: nn.Module
    forward: Callable[..., Any]
    graph_key: Callable[[], str | None]  # names the weights in use; None if calls must not be captured
    capture: CaptureFn
    graphs: dict[Hashable, CapturedGraph | None] = field(default_factory=dict)
    failed: bool = False

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        flat, form = tree_flatten((inputs, named))
        key = self._key(flat, form)
        if key is None or self.failed:
            return self.forward(*inputs, **named)
        if key not in self.graphs:
            if len(self.graphs) < MAX_GRAPHS:
                self.graphs[key] = None
            return self.forward(*inputs, **named)  # a warm-up call that chooses kernels and allocates memory
        graph = self.graphs[key] or self._capture_graph(flat, form)
        if graph is None:
            return self.forward(*inputs, **named)
        self.graphs[key] = graph
        tensors = [x for x in flat if isinstance(x, Tensor)]
        for buffer, x in zip(graph.inputs, tensors, strict=True):
            buffer.copy_(x)
        graph.replay()
        return tree_map(lambda x: x.clone() if isinstance(x, Tensor) else x, graph.outputs)

    def _key(self, flat: list[Any], form: Any) -> Hashable | None:
        """Return everything a captured graph depends on; None if the call must run eagerly."""
        state = self.graph_key()
        if state is None or torch.is_grad_enabled() or torch.compiler.is_compiling() or _is_capturing():
            return None
        tensors = [*self.net.parameters(), *self.net.buffers()]
        device = tensors[0].device
        if any(x.device != device if isinstance(x, Tensor) else not isinstance(x, PLAIN_TYPES) for x in flat):
            return None
        kinds = tuple((x.shape, x.stride(), x.dtype) if isinstance(x, Tensor) else (type(x), x) for x in flat)
        cast = torch.is_autocast_enabled(device.type) and torch.get_autocast_dtype(device.type)
        # A graph reads fixed addresses, so it is only valid while the weights are there.
        addresses = hash(tuple(x.data_ptr() for x in tensors))
        return state, str(form), kinds, cast, self.net.training, addresses

    def _capture_graph(self, flat: list[Any], form: Any) -> CapturedGraph | None:
        buffers = [x.clone() if isinstance(x, Tensor) else x for x in flat]
        inputs, named = tree_unflatten(buffers, form)
        try:
            outputs, replay = self.capture(lambda: self.forward(*inputs, **named))
        except RuntimeError as error:
            self.failed = True
            cause = str(error).splitlines()[0]
            warnings.warn(
                f"engine.cuda_graphs: this network cannot be captured ({cause:.200}), so it runs without CUDA "
                "graphs; set engine.cuda_graphs=false to hide this warning [TM268]",
                stacklevel=2,
            )
            return None
        return CapturedGraph([x for x in buffers if isinstance(x, Tensor)], outputs, replay)


def _is_capturing() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def make_capture() -> CaptureFn:
    """Return a function that captures graphs. They share a memory pool: outputs are copied before the next replay."""
    pool = torch.cuda.graph_pool_handle()

    def capture(call: Callable[[], Any]) -> tuple[Any, Callable[[], None]]:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            outputs = call()
        return outputs, graph.replay

    return capture


def use_cuda_graphs(net: nn.Module, graph_key: Callable[[], str | None], capture: CaptureFn) -> None:
    """Replace `net.forward` by a version with CUDA graphs; names of parameters stay the same."""
    net.forward = CudaGraphForward(net, net.forward, graph_key, capture)
