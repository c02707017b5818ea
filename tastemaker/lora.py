"""Low-rank adapters on peft's layers, injected in place; the one file that imports peft."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.lora import LoraLayer
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn

from .weights import Holder, Weights, missing

LIVE = "live"


class LoraWeights(Weights):
    """Only adapters train; the reference is the network with them switched off, and costs nothing."""

    def __init__(self, net: nn.Module, config: LoraConfig, snapshots: Sequence[str] = ()) -> None:
        self.net, self.config = net, config
        self.names = [LIVE, *(name for name in snapshots if name != "reference")]
        # All adapters are made at once: none may be added once the network is sharded.
        with warnings.catch_warnings(action="ignore", category=UserWarning):  # that there are several is meant
            for name in self.names:
                inject_adapter_in_model(config, net, name)
        self._activate(LIVE)
        for name in self.names[1:]:
            self.blend(name)

    def _layers(self) -> Iterator[BaseTunerLayer]:
        return (module for module in self.net.modules() if isinstance(module, BaseTunerLayer))

    def _activate(self, name: str) -> None:
        for layer in self._layers():
            layer.set_adapter(name)
        self._mark()

    def _switch(self, *, on: bool) -> None:
        for layer in self._layers():
            layer.enable_adapters(on)
        self._mark()

    def _mark(self) -> None:
        # peft moves requires_grad about with the active adapter, but FSDP2 takes it over for good at its first gather,
        # whichever adapter is active then: so it is set back each time.
        for key, p in self.net.named_parameters():
            p.requires_grad_(f".{LIVE}." in key)

    def _of(self, name: str) -> dict[str, nn.Parameter]:
        mark = f".{name}."
        return {key.replace(mark, "."): p for key, p in self.net.named_parameters() if mark in key and "lora_" in key}

    def trainable(self) -> dict[str, nn.Parameter]:
        return self._of(LIVE)

    def stored(self) -> dict[str, dict[str, Tensor]]:
        return {name: dict(self._of(name)) for name in self.names[1:]}

    @torch.no_grad()
    def blend(self, name: str, decay: float = 0.0) -> None:
        if name not in self.names[1:]:
            raise missing(name, self.names[1:])
        live = self._of(LIVE)
        for key, p in self._of(name).items():
            p.lerp_(live[key].to(p.dtype), 1 - decay)

    @torch.no_grad()
    def merged(self, name: str = LIVE) -> dict[str, Tensor]:
        """Every tensor of the network as it was named before, adapters of that name added to what they adapt."""
        layers: dict[str, Any] = dict(self.net.named_modules())
        whole: dict[str, Tensor] = {}
        for key, x in self.net.state_dict().items():
            layer, inside, last = key.rpartition(".base_layer.")
            if inside and last == "weight":
                whole[f"{layer}.{last}"] = (x.float() + layers[layer].get_delta_weight(name).float()).to(x.dtype)
            elif "lora_" not in key:
                whole[f"{layer}.{last}" if inside else key] = x
        return whole

    def scale(self, by: float) -> None:
        """Let every adapter count so many times as much as it was trained to."""
        for layer in (module for module in self.net.modules() if isinstance(module, LoraLayer)):
            for name in self.names:
                layer.set_scale(name, by)

    @contextmanager
    def use(self, name: str) -> Iterator[None]:
        if name != "reference" and name not in self.names:
            raise missing(name, ["reference", *self.names[1:]])
        try:
            if name == "reference":
                self._switch(on=False)
            else:
                self._activate(name)
            with torch.no_grad():
                yield
        finally:
            self._switch(on=True)
            self._activate(LIVE)


@dataclass(frozen=True)
class Lora:
    """Train low-rank adapters on the linear layers named in `targets` (peft's rules; all-linear is every one)."""

    rank: int = 16
    alpha: float | None = None  # scale is alpha / rank; twice the rank if not given
    targets: tuple[str, ...] | str = "all-linear"
    dropout: float = 0.0
    adapts: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not (1 <= self.rank <= 65_536 and 0 <= self.dropout < 1 and (self.alpha is None or self.alpha > 0)):
            found = f"rank {self.rank}, alpha {self.alpha}, dropout {self.dropout}"
            raise ValueError(f"found {found}; expected rank of at least 1, alpha above 0, dropout from 0 to below 1")

    def apply(self, model: Holder, snapshots: Sequence[str]) -> Weights:
        targets = self._linear(model.net) if self.targets == "all-linear" else list(self.targets)
        alpha = 2 * self.rank if self.alpha is None else self.alpha
        config = LoraConfig(r=self.rank, lora_alpha=alpha, target_modules=targets, lora_dropout=self.dropout)  # type: ignore[arg-type]
        return LoraWeights(model.net, config, snapshots)

    @staticmethod
    def _linear(net: nn.Module) -> list[str]:
        return [name for name, module in net.named_modules() if isinstance(module, nn.Linear)]
