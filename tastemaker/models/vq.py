"""The tokenizer as configurations name it, and those trained with it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

import torch
from pydantic import Field, NonNegativeFloat

from ..pretrained import fill
from ..registry import ConfigError
from ..types import Placement
from . import files
from .nets.palette import Palette
from .nets.vq import VQ, VQShape, tolerated

Count = Annotated[int, Field(ge=1, le=64)]
Channels = Annotated[int, Field(ge=8, le=1024, multiple_of=8)]
Codes = Annotated[int, Field(ge=8, le=2**18)]


@dataclass(frozen=True)
class Vq:
    """LlamaGen's convolutional tokenizer, by a codebook or by signs alone (LFQ)."""

    channels: Channels = 32
    multipliers: tuple[Count, ...] = (1, 2, 2, 4)  # of the channels, one a level; each level but the first halves
    blocks: Count = 1  # a level
    latent: Channels = 64  # channels around the quantiser
    codes: Codes = 2048
    width: Count = 8  # of a code; signs need none
    quantizer: Literal["codebook", "signs"] = "codebook"
    groups: Count = 8  # of channels that are normalised together; published tokenizers have 32
    commitment: NonNegativeFloat = 0.25
    entropy: NonNegativeFloat = 0.0
    idle: NonNegativeFloat = 1.0  # weight of drawing codes that nothing uses to the pictures
    weights: str | None = None  # to start from
    seed: int = 0

    def __post_init__(self) -> None:
        self.shape()

    def shape(self) -> VQShape:
        return VQShape(
            self.channels, self.multipliers, self.blocks, self.latent, self.codes, self.width, self.quantizer,
            self.groups, self.commitment, self.entropy, self.idle,
        )  # fmt: skip

    def load(self, placement: Placement) -> VQ:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            net = VQ(self.shape())
        if self.weights:
            fill(net, tolerated(files.read(self.weights)[0]), self.weights)
        return net.to(placement.device)

    def tiny(self) -> Vq:
        return replace(self, channels=8, blocks=1, latent=8, groups=2, codes=64, weights=None)


def tokenizer(name: str | None, codes: int, side: int, size: int, placement: Placement) -> VQ | Palette:
    """The trained tokenizer of a name, frozen; without a name, the colours of cells in its place."""
    if name is None:
        return Palette(codes, side, size).to(placement.device)
    tensors, config = files.read(name)
    settings: dict[str, Any] = dict(config.get("autoencoder", {}))
    if settings.pop("type", None) != "vq":
        raise ConfigError(f"model.codec: '{name:.200}' holds no vq; train one with `tastemaker train playground-vq`")
    shape = {**settings, "multipliers": tuple(settings["multipliers"]), "weights": None}
    net = Vq(**shape).load(Placement())
    if (net.shape.codes, net.shape.stride * side) != (codes, size):
        found = f"{net.shape.codes} codes of {net.shape.stride} pixels a side"
        raise ConfigError(
            f"model.codec: '{name:.200}' has {found}, the model expects {codes} of {size // side}; make them alike"
        )
    fill(net, tolerated(tensors), name)
    return net.requires_grad_(False).eval().to(placement.device)
