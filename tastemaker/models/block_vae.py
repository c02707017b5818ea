"""explainingai's variational autoencoder as configurations name it, and checkpoints that do not say their sizes."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Annotated, Any, Literal, Self

import torch
from pydantic import Field, NonNegativeFloat
from torch import Tensor

from ..core.registry import ConfigError
from ..core.types import Placement
from . import loading
from .nets.block_vae import LATENT_STATS_KEYS, BlockVaeConfig, BlockVaeNet
from .pretrained import load_weights_into

Count = Annotated[int, Field(ge=1, le=64)]
Width = Annotated[int, Field(ge=1, le=4096)]
IDENTIFYING_KEY = "encoder_conv_in.weight"  # a tensor by which its checkpoints are known


@dataclass(frozen=True)
class BlockVae:
    """A variational autoencoder of blocks down, between and up, with attention; checkpoints of explainingai load."""

    im_channels: Literal[1, 3] = 3  # with one, it copies how light pictures are
    z_channels: Annotated[int, Field(ge=1, le=256)] = 4
    down_channels: tuple[Width, ...] = (128, 256, 384)
    mid_channels: tuple[Width, ...] = (384, 384)  # a block with attention between each two; of one number, none
    down_sample: tuple[bool, ...] = (True, True)  # which blocks halve
    attn_down: tuple[bool, ...] = (False, False)  # which attend
    norm_channels: Count = 32  # groups of channels that are normalised together
    num_heads: Count = 4
    num_down_layers: Count = 2
    num_mid_layers: Count = 2
    num_up_layers: Count = 2
    kl: NonNegativeFloat = 5e-6  # weight of the divergence, summed over a picture's latents
    weights: str | None = None  # to start from: a run, a file of ours, or vae_autoencoder_ckpt.pth
    seed: int = 0

    def __post_init__(self) -> None:
        self.shape()

    def shape(self) -> BlockVaeConfig:
        own = asdict(self)
        return BlockVaeConfig(**{name: own[name] for name in BlockVaeConfig.__dataclass_fields__})

    def load(self, placement: Placement) -> BlockVaeNet:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            net = BlockVaeNet(self.shape(), self.kl)
        if self.weights:
            tensors = loading.read_checkpoint(self.weights)
            self._alike(tensors)
            load_weights_into(net, tensors, self.weights, LATENT_STATS_KEYS)
        return net.to(placement.device)

    def _alike(self, tensors: Mapping[str, Tensor]) -> None:
        """Refuse weights with more or fewer blocks between, which a number too many or too few is the cause of."""
        found, own = count_mid_blocks(tensors), len(self.mid_channels) - 1
        if IDENTIFYING_KEY in tensors and found != own:
            right = [self.mid_channels[-1]] * (found + 1)
            raise ConfigError(
                f"autoencoder.mid_channels: '{self.weights!s:.200}' has {found} blocks in the middle, and "
                f"{list(self.mid_channels)} makes {own}, for a block lies between two numbers; set it to {right}"
            )

    def fitted(self, tensors: Mapping[str, Tensor]) -> Self:
        """With the sizes that tensors tell, and what they do not tell as it is."""
        return replace(self, **infer_block_vae_settings(tensors))

    def tiny(self) -> BlockVae:
        groups = math.gcd(self.norm_channels, 4)
        heads = math.gcd(self.num_heads, 2)
        return replace(
            self, down_channels=(8,) * len(self.down_channels), mid_channels=(8,) * len(self.mid_channels),
            norm_channels=groups, num_heads=heads, num_down_layers=1, num_mid_layers=1, num_up_layers=1, weights=None,
        )  # fmt: skip


def count_mid_blocks(tensors: Mapping[str, Tensor]) -> int:
    return len({key.split(".")[1] for key in tensors if key.startswith("encoder_mids.")})


def infer_block_vae_settings(tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """What tensors tell of sizes, by the names of settings."""

    def layers(block: str) -> int:
        return sum(bool(re.fullmatch(rf"{block}\.residual_input_conv\.\d+\.weight", key)) for key in tensors)

    first = tensors[IDENTIFYING_KEY]
    ways = len({key.split(".")[1] for key in tensors if key.startswith("encoder_layers.")})
    after = [tensors[f"encoder_layers.{i}.residual_input_conv.0.weight"].shape[0] for i in range(ways)]
    widths = (first.shape[0], *after)
    mids = [
        tensors[f"encoder_mids.{i}.residual_input_conv.0.weight"].shape[0] for i in range(count_mid_blocks(tensors))
    ]
    found: dict[str, Any] = {
        "im_channels": first.shape[1],
        "z_channels": tensors["post_quant_conv.weight"].shape[0],
        "down_channels": widths,
        "mid_channels": (widths[-1], *mids),
        "down_sample": tuple(f"encoder_layers.{i}.down_sample_conv.weight" in tensors for i in range(ways)),
        "attn_down": tuple(f"encoder_layers.{i}.attentions.0.in_proj_weight" in tensors for i in range(ways)),
        "num_down_layers": layers(r"encoder_layers\.0"),
        "num_up_layers": layers(r"decoder_layers\.0"),
    }
    return {**found, **({"num_mid_layers": layers(r"encoder_mids\.0") - 1} if mids else {})}
