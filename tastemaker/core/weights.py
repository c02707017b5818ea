"""Named sets of weights: the live ones, and snapshots (reference, old, ema) the network can run on for a while."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import ClassVar, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from .randomness import Randomness

TensorDict = dict[str, Tensor]


class HasNet(Protocol):
    """Whatever calls the network by this attribute, so that another can stand in for it."""

    net: nn.Module


@runtime_checkable
class HasDataDependentForward(Protocol):
    """A network of which a call reaches only some parts, by what is in its rows: ranks may call different ones."""

    partial: bool


@runtime_checkable
class HasExtraForwardMethods(Protocol):
    """A network that is called by other methods too, where all of its parts are at hand."""

    entries: tuple[str, ...]


@runtime_checkable
class HasUnusedParameters(Protocol):
    """A network with parameters that never receive a gradient, such as the text branch of a last block."""

    idle: tuple[str, ...]  # how the names of such tensors begin


class Weights(ABC):
    """Which parameters train, which snapshots exist, and how to run on one.

    Borrow weights before the live graph is built: autograd refuses a graph whose parameters changed under it.
    """

    net: nn.Module

    @abstractmethod
    def trainable(self) -> dict[str, nn.Parameter]: ...
    @abstractmethod
    def stored(self) -> dict[str, TensorDict]:
        """The snapshots kept as tensors, by name, to be saved and loaded in place."""

    @abstractmethod
    def blend(self, name: str, decay: float = 0.0) -> None:
        """Move the named snapshot towards the live weights; decay 0 copies, and creates it at first use."""

    @abstractmethod
    def use(self, name: str) -> AbstractContextManager[None]:
        """Within the block the network runs on the named weights, without gradients."""

    def alike(self) -> str | None:
        """Key under which a CUDA graph of the network may be reused; None while dropout is active."""
        return ""

    def dropping(self, rng: Randomness, draw: int = 0) -> AbstractContextManager[None]:
        """Within the block, where an update is learned, layers with dropout leave out what these rows draw."""
        return nullcontext()


class Tuning(Protocol):
    """What a configuration says of the weights; `snapshots` are those the objective and the run will ask for."""

    adapts: ClassVar[bool]  # whether the network itself stays frozen beside what is added to it

    def apply(self, model: HasNet, snapshots: Sequence[str]) -> Weights: ...


def unknown_snapshot_error(name: str, have: Sequence[str]) -> ValueError:
    known = ", ".join(have) or "none"
    return ValueError(
        f"no snapshot is called '{name}' (there are: {known}); `ema` makes one, others come of objectives"
    )


class FullWeights(Weights):
    """Every parameter trains; a snapshot is a copy of all of them."""

    def __init__(self, net: nn.Module, snapshots: Sequence[str] = (), host: bool = False) -> None:
        self.net, self.host = net, host
        self.snapshots: dict[str, TensorDict] = {}
        net.requires_grad_(True)
        for name in snapshots:
            self.blend(name)

    def trainable(self) -> dict[str, nn.Parameter]:
        return dict(self.net.named_parameters())

    def stored(self) -> dict[str, TensorDict]:
        return self.snapshots

    @torch.no_grad()
    def blend(self, name: str, decay: float = 0.0) -> None:
        live = dict(self.net.named_parameters())
        if name not in self.snapshots:
            self.snapshots[name] = {
                key: p.detach().to("cpu", copy=True) if self.host else p.detach().clone() for key, p in live.items()
            }
        kept = self.snapshots[name]
        # All at once: a small network's average would otherwise take longer than its gradient.
        torch._foreach_lerp_(
            list(kept.values()), [live[key].to(x.device, x.dtype) for key, x in kept.items()], 1 - decay
        )

    @contextmanager
    def use(self, name: str) -> Iterator[None]:
        if name not in self.snapshots:
            raise unknown_snapshot_error(name, list(self.snapshots))
        live = {key: p.detach().clone() for key, p in self.net.named_parameters()}
        with torch.no_grad():
            try:
                self._load(self.snapshots[name])
                yield
            finally:
                self._load(live)

    @torch.no_grad()
    def _load(self, values: TensorDict) -> None:
        # Copied in place: FSDP2 gathers from storage of its own, which a swapped `.data` never reaches.
        for key, p in self.net.named_parameters():
            p.copy_(values[key])


class FrozenCopyWeights(Weights):
    """Every parameter trains beside a second, frozen network; switching is a pointer."""

    def __init__(self, holder: HasNet, twins: dict[str, nn.Module]) -> None:
        self.holder, self.net, self.twins = holder, holder.net, twins
        self.net.requires_grad_(True)
        for twin in twins.values():
            twin.requires_grad_(False)

    def trainable(self) -> dict[str, nn.Parameter]:
        return dict(self.net.named_parameters())

    def stored(self) -> dict[str, TensorDict]:
        return {name: dict(twin.named_parameters()) for name, twin in self.twins.items()}

    @torch.no_grad()
    def blend(self, name: str, decay: float = 0.0) -> None:
        if name not in self.twins:
            raise unknown_snapshot_error(name, list(self.twins))
        kept: list[Tensor] = list(self.twins[name].parameters())
        live = [p.to(x.dtype) for p, x in zip(self.net.parameters(), kept, strict=True)]
        torch._foreach_lerp_(kept, live, 1 - decay)

    @contextmanager
    def use(self, name: str) -> Iterator[None]:
        if name not in self.twins:
            raise unknown_snapshot_error(name, list(self.twins))
        with torch.no_grad():
            try:
                self.holder.net = self.twins[name]
                yield
            finally:
                self.holder.net = self.net


@dataclass(frozen=True)
class FullFinetuning:
    """Train every parameter of the network."""

    host: bool = False  # keep snapshots in host memory
    adapts: ClassVar[bool] = False

    def apply(self, model: HasNet, snapshots: Sequence[str]) -> Weights:
        return FullWeights(model.net, snapshots, self.host)


@dataclass(frozen=True)
class FrozenCopyFinetuning:
    """Train every parameter; each snapshot is a network of its own, sharded like the live one."""

    adapts: ClassVar[bool] = False

    def apply(self, model: HasNet, snapshots: Sequence[str]) -> Weights:
        import copy

        return FrozenCopyWeights(model, {name: copy.deepcopy(model.net) for name in snapshots})


def ema_decay_warmup(decay: float, updates: int) -> float:
    """An EMA decay that starts low, so that early averages are not stuck at the start: min((1 + n)/(10 + n), decay)."""
    return min((1 + updates) / (10 + updates), decay)
