"""The small autoencoder as configurations name it, and those trained with it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from pydantic import Field, NonNegativeFloat

from ..core.autoencoder import ContinuousAutoencoder
from ..core.registry import ConfigError
from ..core.types import Placement
from . import weight_files
from .autoencoder_loading import load_autoencoder
from .nets.vae import Autoencoder, PixelShuffleAutoencoder
from .pretrained import load_weights_into, with_fast_convolutions

Channels = Annotated[int, Field(ge=1, le=256)]


@dataclass(frozen=True)
class Vae:
    """A convolutional autoencoder with continuous latents; variational where `kl` is above zero."""

    channels: Channels = 16
    width: Annotated[int, Field(ge=8, le=512, multiple_of=8)] = 40
    factor: Literal[4, 8] = 8  # pixels a side that one latent stands for
    noise: NonNegativeFloat = 0.05  # on the latents while training, in their standard deviations
    kl: NonNegativeFloat = 0.0
    weights: str | None = None  # to start from
    seed: int = 0

    def load(self, placement: Placement) -> Autoencoder:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            net = Autoencoder(self.channels, self.width, self.factor, self.noise, self.kl)
        if self.weights:
            load_weights_into(net, weight_files.read_weights(self.weights)[0], self.weights)
        return net.to(placement.device)

    def tiny(self) -> Vae:
        return Vae(self.channels, 8, self.factor, self.noise, self.kl, None, self.seed)


def load_vae(name: str | None, channels: int, factor: int, placement: Placement) -> ContinuousAutoencoder:
    """The trained autoencoder of a name, of whichever kind, frozen; without a name, coarse pixels in its place."""
    if name is None:
        return PixelShuffleAutoencoder(channels, factor)
    try:
        net = with_fast_convolutions(load_autoencoder(name, placement))
    except ConfigError as error:
        raise ConfigError(f"model.codec: {error}") from error
    if not isinstance(net, ContinuousAutoencoder):
        raise ConfigError(
            f"model.codec: '{name:.200}' holds no vae but a {type(net).__name__}; "
            "train one with `tastemaker train playground-vae`"
        )
    if (net.channels, net.stride) != (channels, factor):
        raise ConfigError(
            f"model.codec: '{name:.200}' has {net.channels} channels and factor {net.stride}, the model expects "
            f"{channels} and {factor}; set model.channels={net.channels} and model.factor={net.stride}, or "
            "another codec"
        )
    return net
