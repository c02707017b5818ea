"""The interface of autoencoders: what their training, their export and generators on their latents need."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Self

import torch
from torch import Tensor, nn

from .cards import WeightsSource
from .registry import AUTOENCODERS as AUTOENCODERS
from .types import Placement


class AutoencoderNet(nn.Module):
    """A network that maps pixels [N, 3, H, W] in [0, 1] to their reconstruction and a further loss, [N] or a scalar.

    Any `nn.Module` with such a `forward` trains. Derive from this class to add the abilities below.
    """

    channels: int = 0  # of continuous latents [N, channels, H / stride, W / stride]; 0: it has none
    codebook_size: int = 0  # of a tokenizer; 0: it has none
    stride: int = 1  # pixels per latent; the sides of an image are multiples of it
    export_format: str = ""  # the name of the format that `export` writes, for `export --layout`; empty: it has none

    def encode(self, pixels: Tensor) -> Tensor:
        """Latents [N, C, h, w], or token ids [N, h * w]."""
        raise NotImplementedError(
            f"{type(self).__name__} does not implement encode; define encode(pixels), or use an autoencoder that can "
            "encode [TM073]"
        )

    def decode(self, z: Tensor) -> Tensor:
        """Pixels [N, 3, H, W] in [0, 1] of latents or token ids."""
        raise NotImplementedError(
            f"{type(self).__name__} does not implement decode; define decode(z), or use an autoencoder that can "
            "decode [TM074]"
        )

    def measure_latents(self, pixels: Tensor) -> None:
        """Measure mean and standard deviation of the latents, once training is done."""

    def codebook_usage(self, pixels: Tensor) -> float:
        """The share of the codebook that these images use, for tokenizers."""
        raise NotImplementedError(
            f"{type(self).__name__} does not have a codebook; use a VQ or LFQ autoencoder [TM075]"
        )

    def latent_noise_shape(self, pixels: Tensor) -> tuple[int, ...] | None:
        """Shape, per image, of the standard normal noise that `net(pixels, noise)` takes; None if it takes none."""
        return None

    def loss_metrics(self, loss: Tensor) -> dict[str, Tensor]:
        """The further loss that `forward` returned, by the name under which training and validation log it."""
        return {"own_loss": loss.detach()}

    def last_layer(self) -> nn.Conv2d | None:
        """The layer that makes the pixels, for the discriminator's adaptive weight; None if it is not known."""
        return None

    def export(self, out: Path, dtype: torch.dtype) -> None:
        """Write the weights in `export_format` to a path that does not exist yet."""
        raise NotImplementedError(
            f"{type(self).__name__} cannot be exported; define export(out, dtype), or use the run directory itself as "
            "weights [TM076]"
        )


PLAIN_NETWORK = AutoencoderNet()  # the abilities of a network that has none


def as_autoencoder(net: nn.Module) -> AutoencoderNet:
    """The network itself, or the defaults if it is an `nn.Module` of the user's that does not derive from ours."""
    return net if isinstance(net, AutoencoderNet) else PLAIN_NETWORK


class AutoencoderSpec(ABC):
    """The settings of an autoencoder, a frozen dataclass; `load` builds the network."""

    @abstractmethod
    def load(self, placement: Placement) -> nn.Module: ...
    @abstractmethod
    def tiny(self) -> AutoencoderSpec:
        """Settings of a small random version, for tests."""

    @property
    def sources(self) -> tuple[WeightsSource, ...]:
        """Published weights that these settings need."""
        return ()

    def with_inferred_sizes(self, tensors: Mapping[str, Tensor]) -> Self:
        """The settings with the sizes that the tensors of a checkpoint have."""
        return self
