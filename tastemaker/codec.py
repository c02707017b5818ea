"""What an autoencoder brings to be trained; generators that live in its latents only encode and decode."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from torch import Tensor, nn

from .types import Placement


class CodecSpec(Protocol):
    """What a configuration says of an autoencoder; loading makes the network.

    The network maps pixels [N, 3, H, W] in [0, 1] to their reconstruction and a further loss, [N] or a scalar.
    """

    def load(self, placement: Placement) -> nn.Module: ...
    def tiny(self) -> CodecSpec:
        """The same at small size, for tests."""


@runtime_checkable
class Settling(Protocol):
    """A network that measures its latents once its weights are what they are."""

    def settle(self, pixels: Tensor) -> None: ...


@runtime_checkable
class Counted(Protocol):
    """A network that says tokens, of which some may never be said."""

    def share(self, pixels: Tensor) -> float:
        """How many of its codes some pictures use, of all."""


@runtime_checkable
class Ending(Protocol):
    """A network that says which layer makes its pixels."""

    def ending(self) -> nn.Conv2d: ...
