"""An autoencoder of a class of one's own that knows how to make itself, as nanoVLA-RL's do."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from ..core.registry import ConfigError, Registry
from ..core.types import Placement
from . import loading
from .pretrained import load_weights_into

NETWORKS = Registry("network", {})  # which are registered by those who wrote them


def has_from_config(cls: Any) -> bool:
    """Whether a class is a network that makes itself."""
    return issubclass(cls, nn.Module) and "from_config" in dir(cls)


@dataclass(frozen=True)
class CustomAutoencoder:
    """A network of your own, made by its class's `from_config` of `params`."""

    of: str  # my_package.module:Class, or what it is registered as
    params: Mapping[str, Any] = field(default_factory=dict)
    weights: str | None = None  # to start from

    def load(self, placement: Placement) -> nn.Module:
        cls: Any = NETWORKS.find(self.of, "autoencoder.of")
        if not has_from_config(cls):
            raise ConfigError(f"autoencoder.of: '{self.of:.60}' is no nn.Module with a classmethod from_config; add it")
        net: nn.Module = cls.from_config(dict(self.params))
        if self.weights:
            load_weights_into(net, loading.read_checkpoint(self.weights), self.weights)
        return net.to(placement.device)

    def tiny(self) -> CustomAutoencoder:
        return self  # how small it can be is its own to say
