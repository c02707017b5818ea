"""Trace peak memory and FLOPs of a computation on fake tensors."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from ..core.fused_lora import FLOP_FORMULAS


class AllocationTracker(TorchDispatchMode):  # type: ignore[no-untyped-call]  # not in stubs
    """Tracks the bytes of live tensors and their peak. The value of a fake number on the host is 0 or False."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live, self.peak = 0, 0
        self._storages: set[int] = set()

    def ignore(self, tensors: Any) -> None:
        """Do not count tensors that existed before."""
        self._storages |= {id(x.untyped_storage()) for x in tree_leaves(tensors) if isinstance(x, Tensor)}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default and isinstance(args[0], FakeTensor):
            dtype = args[0].dtype
            return False if dtype == torch.bool else 0.0 if dtype.is_floating_point else 0
        result = func(*args, **(kwargs or {}))
        for x in tree_leaves(result):
            if isinstance(x, Tensor):
                self._add(x.untyped_storage())
        return result

    def _add(self, storage: torch.UntypedStorage) -> None:
        key, size = id(storage), storage.nbytes()
        if key in self._storages:
            return
        self._storages.add(key)
        self.live += size
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._drop, key, size)

    def _drop(self, key: int, size: int) -> None:
        self._storages.discard(key)
        self.live -= size


class FakeAttention(torch.autograd.Function):
    """Fused attention as on a GPU: saves its inputs, its output and one number per query for backward."""

    flops: ClassVar[int] = 0  # of all forward passes since it was reset

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        out = torch.empty_like(query[..., :1]).expand(*query.shape[:-1], value.shape[-1]).contiguous()
        FakeAttention.flops += 4 * query.numel() * key.shape[-2]
        ctx.save_for_backward(query, key, value, out, query.new_empty(query.shape[:-1], dtype=torch.float32))
        return out

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> tuple[Tensor, ...]:
        return tuple(torch.empty_like(x) for x in ctx.saved_tensors[:3])


def fake_attention(query: Tensor, key: Tensor, value: Tensor, *settings: Any, **named: Any) -> Tensor:
    """Replaces PyTorch's attention, which on a CPU would allocate the matrix of queries and keys."""
    inputs = [query, key, value]
    if torch.is_autocast_enabled("cpu"):
        inputs = [x.to(torch.get_autocast_dtype("cpu")) for x in inputs]
    call: Callable[..., Tensor] = FakeAttention.apply
    return call(*inputs)


@contextmanager
def use_fake_kernels() -> Iterator[None]:
    """Replace attention and `nonzero` within the block, also when a backward pass recomputes them, as no mode does."""
    nonzero: Any = torch.nonzero

    def fake_nonzero(mask: Tensor, *, as_tuple: bool = False) -> Any:
        """The indices of a fake mask as if all of it were true: no text token is padding."""
        if not isinstance(mask, FakeTensor):
            return nonzero(mask, as_tuple=as_tuple)
        return torch.empty(mask.numel(), mask.dim(), dtype=torch.long, device=mask.device)

    replacements: tuple[tuple[Any, str, Any], ...] = (
        (functional, "scaled_dot_product_attention", fake_attention),
        (torch, "nonzero", fake_nonzero),
    )
    originals = [getattr(module, name) for module, name, _ in replacements]
    for module, name, replacement in replacements:
        setattr(module, name, replacement)
    try:
        yield
    finally:
        for (module, name, _), original in zip(replacements, originals, strict=True):
            setattr(module, name, original)


def trace_peak_bytes(work: Callable[[], Any], existing: Any) -> int:
    """The peak of the bytes that `work` allocates, beside tensors that exist already."""
    tracker = AllocationTracker()
    tracker.ignore(existing)
    with tracker, use_fake_kernels():
        work()
    return tracker.peak


def count_flops(work: Callable[[], Any]) -> float:
    """The FLOPs of matrix products, convolutions and attention."""
    FakeAttention.flops = 0
    counter: Any = FlopCounterMode(display=False, custom_mapping=FLOP_FORMULAS)
    with counter, use_fake_kernels():
        work()
    return float(counter.get_total_flops() + FakeAttention.flops)
