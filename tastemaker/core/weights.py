"""Named sets of weights: the live ones, and snapshots (reference, old, ema) the network can run on for a while."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from types import MappingProxyType
from typing import ClassVar, Protocol

import torch
from torch import Tensor, nn

from .randomness import Randomness

TensorDict = dict[str, Tensor]


@dataclass(frozen=True)
class NetworkTraits:
    """Facts about a network that the engine, LoRA and the doctor need and cannot read off an `nn.Module`."""

    lora_targets: tuple[str, ...] = ()  # suffixes of the layers with adapters by default; empty: all linear layers
    unused_parameters: tuple[str, ...] = ()  # prefixes of parameters without gradient, as the last block's text branch
    extra_forward_methods: tuple[str, ...] = ()  # methods besides `forward` that run the whole network
    data_dependent_forward: bool = False  # which parts run depends on the batch (mixture of experts)
    channels_last: bool = False  # the forward pass works on channels_last tensors: it contains no `view`
    cudnn_backward: bool = False  # the gradient of attention is contiguous, so cuDNN's backward kernel is safe


class DeferredTensors(Protocol):
    """The tensors of a network on the meta device, in the attribute `deferred_tensors` of its module.

    They stay in their files until the network is sharded; then each rank reads its rows of each.
    """

    fingerprint: str  # the same on ranks that read the same files

    def read(self, name: str, start: int, count: int) -> Tensor:
        """Return `count` rows of a tensor from `start` on, in the dtype that the network is loaded in."""


class TrainableModel:
    """Owner of the network that trains. Calls go through the attribute `net`, so that it can be replaced."""

    net: nn.Module
    traits: NetworkTraits = NetworkTraits()

    def enable_text_encoder_training(self) -> dict[str, nn.Module]:
        """Make the text encoders trainable and return them by component name; empty if the model has none.

        From then on every call encodes the prompts again, with gradients.
        """
        return {}


class Weights(ABC):
    """Which parameters train, which snapshots of them exist, and how to run the network on a snapshot.

    Run on a snapshot before the graph of the live weights is built: autograd refuses a graph whose parameters changed.
    """

    net: nn.Module
    traits: NetworkTraits = NetworkTraits()
    active: str = "live"  # name of the weights that the network runs on now
    text_encoders: Mapping[str, nn.Module] = MappingProxyType({})  # those that train with the network, by component

    @abstractmethod
    def trainable(self) -> dict[str, nn.Parameter]: ...
    @abstractmethod
    def snapshot_tensors(self) -> dict[str, TensorDict]:
        """Tensors of every snapshot by name, for checkpoints, which load them in place."""

    @abstractmethod
    def update_snapshot(self, name: str, decay: float = 0.0) -> None:
        """EMA update: snapshot = decay * snapshot + (1 - decay) * live; decay 0 copies, and creates it at first use."""

    @abstractmethod
    def use(self, name: str) -> AbstractContextManager[None]:
        """Context in which the network runs on the named snapshot, without gradients."""

    def graph_key(self) -> str | None:
        """Key under which a CUDA graph of the network may be reused; None while dropout is active."""
        return ""

    def dropout_masks(self, rng: Randomness, draw: int = 0) -> AbstractContextManager[None]:
        """Context of a training pass in which adapters apply dropout, with masks drawn per row."""
        return nullcontext()


class Tuning(Protocol):
    """The `tuning` section: which weights of a model train."""

    is_adapter: ClassVar[bool]  # whether the network is frozen and adapters train

    def apply(self, model: TrainableModel, snapshots: Sequence[str]) -> Weights:
        """Prepare the network for training, with the snapshots that the objective and the run need."""


def unknown_snapshot_error(name: str, have: Sequence[str]) -> ValueError:
    known = ", ".join(have) or "none"
    return ValueError(
        f"snapshot '{name}' does not exist (available: {known}); set ema_decay to keep the snapshot 'ema'; other "
        "snapshots depend on the objective [TM120]"
    )


class FullWeights(Weights):
    """Every parameter trains; a snapshot is a copy of all of them."""

    def __init__(
        self,
        net: nn.Module,
        snapshots: Sequence[str] = (),
        snapshots_on_cpu: bool = False,
        traits: NetworkTraits = NetworkTraits(),
    ) -> None:
        self.net, self.snapshots_on_cpu, self.traits = net, snapshots_on_cpu, traits
        self.snapshots: dict[str, TensorDict] = {}
        net.requires_grad_(True)
        for name in snapshots:
            self.update_snapshot(name)

    def trainable(self) -> dict[str, nn.Parameter]:
        return dict(self.net.named_parameters())

    def snapshot_tensors(self) -> dict[str, TensorDict]:
        return self.snapshots

    @torch.no_grad()
    def update_snapshot(self, name: str, decay: float = 0.0) -> None:
        live = dict(self.net.named_parameters())
        if name not in self.snapshots:
            self.snapshots[name] = {
                # Weights on the meta device have no values yet: the engine copies them once it has read them.
                key: p.detach().to("cpu", copy=True) if self.snapshots_on_cpu and not p.is_meta else p.detach().clone()
                for key, p in live.items()
            }
        snapshot = self.snapshots[name]
        # One fused call: for small networks, a call per tensor takes longer than the backward pass.
        live_tensors = [live[key].to(x.device, x.dtype) for key, x in snapshot.items()]
        torch._foreach_lerp_(list(snapshot.values()), live_tensors, 1 - decay)

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
        # Copied in place: FSDP2 gathers from its own storage, so that replacing `.data` has no effect.
        for key, p in self.net.named_parameters():
            p.copy_(values[key])


class FrozenCopyWeights(Weights):
    """Every parameter trains; each snapshot is a frozen copy of the network, so that switching costs nothing."""

    def __init__(self, model: TrainableModel, copies: dict[str, nn.Module]) -> None:
        self.model, self.net, self.copies, self.traits = model, model.net, copies, model.traits
        self.net.requires_grad_(True)
        for net in copies.values():
            net.requires_grad_(False)

    def trainable(self) -> dict[str, nn.Parameter]:
        return dict(self.net.named_parameters())

    def snapshot_tensors(self) -> dict[str, TensorDict]:
        return {name: dict(net.named_parameters()) for name, net in self.copies.items()}

    @torch.no_grad()
    def update_snapshot(self, name: str, decay: float = 0.0) -> None:
        if name not in self.copies:
            raise unknown_snapshot_error(name, list(self.copies))
        snapshot: list[Tensor] = list(self.copies[name].parameters())
        live = [p.to(x.dtype) for p, x in zip(self.net.parameters(), snapshot, strict=True)]
        torch._foreach_lerp_(snapshot, live, 1 - decay)

    @contextmanager
    def use(self, name: str) -> Iterator[None]:
        if name not in self.copies:
            raise unknown_snapshot_error(name, list(self.copies))
        with torch.no_grad():
            try:
                self.model.net = self.copies[name]
                yield
            finally:
                self.model.net = self.net


@dataclass(frozen=True)
class FullFinetuning:
    """Train every parameter of the network."""

    snapshots_on_cpu: bool = False  # keep snapshots in host memory
    is_adapter: ClassVar[bool] = False

    def apply(self, model: TrainableModel, snapshots: Sequence[str]) -> Weights:
        return FullWeights(model.net, snapshots, self.snapshots_on_cpu, model.traits)


@dataclass(frozen=True)
class FrozenCopyFinetuning:
    """Train every parameter; each snapshot is a frozen copy of the network, sharded like the live one."""

    is_adapter: ClassVar[bool] = False

    def apply(self, model: TrainableModel, snapshots: Sequence[str]) -> Weights:
        import copy

        return FrozenCopyWeights(model, {name: copy.deepcopy(model.net) for name in snapshots})


def ema_decay_warmup(decay: float, updates: int) -> float:
    """EMA decay after n updates: min((1 + n) / (10 + n), decay), so that early averages forget the initial weights."""
    return min((1 + updates) / (10 + updates), decay)
