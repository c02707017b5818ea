"""Trace peak memory and FLOPs of a computation on fake tensors."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode


class AllocationTracker(TorchDispatchMode):  # type: ignore[no-untyped-call]  # not in stubs
    """Counts the bytes of tensors that are made, and those that nobody holds any more."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.held, self.peak = 0, 0
        self._known: set[int] = set()

    def know(self, tensors: Any) -> None:
        """These were there before, and do not count."""
        self._known |= {id(x.untyped_storage()) for x in tree_leaves(tensors) if isinstance(x, Tensor)}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        found = func(*args, **(kwargs or {}))
        for x in tree_leaves(found):
            if isinstance(x, Tensor):
                self._add(x.untyped_storage())
        return found

    def _add(self, storage: torch.UntypedStorage) -> None:
        key, size = id(storage), storage.nbytes()
        if key in self._known:
            return
        self._known.add(key)
        self.held += size
        self.peak = max(self.peak, self.held)
        weakref.finalize(storage, self._drop, key, size)

    def _drop(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.held -= size


class FakeAttention(torch.autograd.Function):
    """Fused attention as GPUs have it: what it keeps is what goes in, what comes out, and a number a query."""

    operations: ClassVar[int] = 0  # of all forward passes since it was set

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        out = torch.empty_like(query[..., :1]).expand(*query.shape[:-1], value.shape[-1]).contiguous()
        FakeAttention.operations += 4 * query.numel() * key.shape[-2]
        ctx.save_for_backward(query, key, value, out, query.new_empty(query.shape[:-1], dtype=torch.float32))
        return out

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> tuple[Tensor, ...]:
        return tuple(torch.empty_like(x) for x in ctx.saved_tensors[:3])


def fake_attention(query: Tensor, key: Tensor, value: Tensor, *settings: Any, **named: Any) -> Tensor:
    """In the place of PyTorch's, which on the host would fill whole matrices of queries and keys."""
    parts = [query, key, value]
    if torch.is_autocast_enabled("cpu"):
        parts = [x.to(torch.get_autocast_dtype("cpu")) for x in parts]
    call: Callable[..., Tensor] = FakeAttention.apply
    return call(*parts)


def fake_nonzero(mask: Tensor, *, as_tuple: bool = False) -> Tensor:
    """In the place of PyTorch's `nonzero`, which asks for numbers: as if all held, so that no word is filling."""
    return torch.empty(mask.numel(), mask.dim(), dtype=torch.long, device=mask.device)


@contextmanager
def use_fake_kernels() -> Iterator[None]:
    """Within the block these are the ones above, also where a backward pass computes them again, as no mode does."""
    places: tuple[tuple[Any, str, Any], ...] = (
        (functional, "scaled_dot_product_attention", fake_attention),
        (torch, "nonzero", fake_nonzero),
    )
    before = [getattr(place, name) for place, name, _ in places]
    for place, name, other in places:
        setattr(place, name, other)
    try:
        yield
    finally:
        for (place, name, _), own in zip(places, before, strict=True):
            setattr(place, name, own)


def trace_peak_bytes(work: Callable[[], Any], known: Any) -> int:
    """The bytes `work` holds at its peak beside what was there before."""
    ledger = AllocationTracker()
    ledger.know(known)
    with ledger, use_fake_kernels():
        work()
    return ledger.peak


def count_flops(work: Callable[[], Any]) -> float:
    """The floating-point operations of matrix products and convolutions; of attention too, which is counted by hand."""
    FakeAttention.operations = 0
    counter: Any = FlopCounterMode(display=False)
    with counter, use_fake_kernels():
        work()
    return float(counter.get_total_flops() + FakeAttention.operations)
