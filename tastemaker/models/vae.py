"""Settings of the small convolutional autoencoder, and of networks of your own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import torch
from pydantic import Field, NonNegativeFloat
from torch import nn

from ..core.autoencoder import AutoencoderSpec
from ..core.registry import ConfigError, Registry
from ..core.types import Placement
from . import loading, weight_files
from .nets.vae import ConvAutoencoder
from .pretrained import load_weights_into

NETWORKS = Registry("network", {})  # classes that users register by name


@dataclass(frozen=True)
class VaeSpec(AutoencoderSpec):
    """A convolutional autoencoder with continuous latents; variational if `kl_weight` is positive."""

    latent_channels: Annotated[int, Field(ge=1, le=256)] = 16
    width: Annotated[int, Field(ge=8, le=512, multiple_of=8)] = 40
    downsample_factor: Literal[4, 8] = 8  # pixels per latent, in each direction
    latent_noise: NonNegativeFloat = 0.05  # on the latents in training, relative to their standard deviation
    kl_weight: NonNegativeFloat = 0.0
    weights: str | None = None  # initial weights
    seed: int = 0

    def load(self, placement: Placement) -> ConvAutoencoder:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            net = ConvAutoencoder(
                self.latent_channels, self.width, self.downsample_factor, self.latent_noise, self.kl_weight
            )
        if self.weights:
            load_weights_into(net, weight_files.read_weights(self.weights)[0], self.weights)
        return net.to(placement.device)

    def tiny(self) -> VaeSpec:
        return VaeSpec(
            self.latent_channels, 8, self.downsample_factor, self.latent_noise, self.kl_weight, None, self.seed
        )


def has_from_config(cls: Any) -> bool:
    """Whether a class is an `nn.Module` with a classmethod `from_config`."""
    return issubclass(cls, nn.Module) and "from_config" in dir(cls)


@dataclass(frozen=True)
class CustomAutoencoderSpec(AutoencoderSpec):
    """A network of your own, built by its class's `from_config(params)`, as those of nanoVLA-RL are."""

    class_path: str  # my_package.module:Class, or a registered name
    params: Mapping[str, Any] = field(default_factory=dict)
    weights: str | None = None  # initial weights

    def load(self, placement: Placement) -> nn.Module:
        cls: Any = NETWORKS.find(self.class_path, "autoencoder.class_path")
        if not has_from_config(cls):
            raise ConfigError(
                f"autoencoder.class_path: '{self.class_path:.60}' is not an nn.Module with a classmethod "
                "from_config; add this method to the class [TM538]"
            )
        net: nn.Module = cls.from_config(dict(self.params))
        if self.weights:
            load_weights_into(net, loading.read_checkpoint(self.weights), self.weights)
        return net.to(placement.device)

    def tiny(self) -> CustomAutoencoderSpec:
        return self  # only the class knows how to make it smaller
