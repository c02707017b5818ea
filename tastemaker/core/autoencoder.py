"""What an autoencoder brings to be trained; generators that live in its latents only encode and decode."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Protocol, Self, runtime_checkable

import torch
from torch import Tensor, nn

from .registry import AUTOENCODERS as AUTOENCODERS
from .types import Placement


class AutoencoderSpec(Protocol):
    """What a configuration says of an autoencoder; loading makes the network.

    The network maps pixels [N, 3, H, W] in [0, 1] to their reconstruction and a further loss, [N] or a scalar.
    """

    def load(self, placement: Placement) -> nn.Module: ...
    def tiny(self) -> AutoencoderSpec:
        """The same at small size, for tests."""


@runtime_checkable
class SupportsLatentStatistics(Protocol):
    """A network that measures its latents once its weights are what they are."""

    def settle(self, pixels: Tensor) -> None: ...


@runtime_checkable
class SupportsCodebookUsage(Protocol):
    """A network that says tokens, of which some may never be said."""

    def share(self, pixels: Tensor) -> float:
        """How many of its codes some pictures use, of all."""


@runtime_checkable
class HasLastLayer(Protocol):
    """A network that says which layer makes its pixels."""

    def ending(self) -> nn.Conv2d: ...


@runtime_checkable
class SupportsLatentNoise(Protocol):
    """A network that blurs its latents by chance, which it may be given: `net(pixels, chance)`."""

    def chances(self, pixels: Tensor) -> tuple[int, ...]:
        """How many standard normal numbers it wants for each picture, and in what shape."""


@runtime_checkable
class ContinuousAutoencoder(Protocol):
    """A network whose latents a denoiser can live in: [N, channels, H / stride, W / stride]."""

    channels: int
    stride: int

    def encode(self, pixels: Tensor) -> Tensor: ...
    def decode(self, z: Tensor) -> Tensor: ...


@runtime_checkable
class HasStride(Protocol):
    """A network that takes pictures whose sides are multiples of something."""

    @property
    def stride(self) -> int: ...


@runtime_checkable
class SupportsExport(Protocol):
    """A network that others know too."""

    @property
    def layout(self) -> str:
        """Who they are, as `export --layout` calls them."""

    def leave(self, out: Path, dtype: torch.dtype) -> None:
        """Write what they load to a file or folder that is not there yet."""


@runtime_checkable
class SupportsShapeInference(Protocol):
    """A spec whose sizes can be told from tensors."""

    def fitted(self, tensors: Mapping[str, Tensor]) -> Self: ...
