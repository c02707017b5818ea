"""Settings of explainingai's variational autoencoder, and the sizes of its published checkpoints."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Annotated, Any, Literal, Self

import torch
from pydantic import Field, NonNegativeFloat
from torch import Tensor

from ..core.autoencoder import AutoencoderSpec
from ..core.registry import ConfigError
from ..core.types import Placement
from . import loading
from .nets.block_vae import LATENT_STATS_KEYS, BlockVaeConfig, BlockVaeNet
from .pretrained import load_weights_into

Count = Annotated[int, Field(ge=1, le=64)]
Width = Annotated[int, Field(ge=1, le=4096)]
IDENTIFYING_KEY = "encoder_conv_in.weight"  # identifies its checkpoints


@dataclass(frozen=True)
class BlockVaeSpec(AutoencoderSpec):
    """The variational autoencoder of explainingai and nanoVLA-RL; their checkpoints load."""

    im_channels: Literal[1, 3] = 3  # 1: only luma is reconstructed
    z_channels: Annotated[int, Field(ge=1, le=256)] = 4
    down_channels: tuple[Width, ...] = (128, 256, 384)
    mid_channels: tuple[Width, ...] = (384, 384)  # one block with attention per neighboring pair
    down_sample: tuple[bool, ...] = (True, True)  # which blocks halve the size
    attn_down: tuple[bool, ...] = (False, False)  # which have attention
    norm_channels: Count = 32  # number of groups of the group norms
    num_heads: Count = 4
    num_down_layers: Count = 2
    num_mid_layers: Count = 2
    num_up_layers: Count = 2
    kl_weight: NonNegativeFloat = 5e-6  # of the KL divergence, summed over the latents of an image
    weights: str | None = None  # initial weights: a run, a file, or a published vae_autoencoder_ckpt.pth
    seed: int = 0

    def __post_init__(self) -> None:
        self.network_config()

    def network_config(self) -> BlockVaeConfig:
        return BlockVaeConfig(**{field.name: getattr(self, field.name) for field in fields(BlockVaeConfig)})

    def load(self, placement: Placement) -> BlockVaeNet:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            net = BlockVaeNet(self.network_config(), self.kl_weight)
        if self.weights:
            tensors = loading.read_checkpoint(self.weights)
            self._check_mid_blocks(tensors)
            load_weights_into(net, tensors, self.weights, LATENT_STATS_KEYS)
        return net.to(placement.device)

    def _check_mid_blocks(self, tensors: Mapping[str, Tensor]) -> None:
        """Refuse weights with another number of middle blocks, and say what to set `mid_channels` to."""
        count, own = count_mid_blocks(tensors), len(self.mid_channels) - 1
        if IDENTIFYING_KEY in tensors and count != own:
            expected = [self.mid_channels[-1]] * (count + 1)
            raise ConfigError(
                f"autoencoder.mid_channels: '{self.weights!s:.200}' has {count} middle blocks, but "
                f"{list(self.mid_channels)} gives {own}, one per pair of neighbors; set "
                f"autoencoder.mid_channels={expected} [TM419]"
            )

    def with_inferred_sizes(self, tensors: Mapping[str, Tensor]) -> Self:
        """The sizes of the tensors; settings that they do not determine stay."""
        return replace(self, **infer_block_vae_settings(tensors))

    def tiny(self) -> BlockVaeSpec:
        groups = math.gcd(self.norm_channels, 4)
        heads = math.gcd(self.num_heads, 2)
        return replace(
            self, down_channels=(8,) * len(self.down_channels), mid_channels=(8,) * len(self.mid_channels),
            norm_channels=groups, num_heads=heads, num_down_layers=1, num_mid_layers=1, num_up_layers=1, weights=None,
        )  # fmt: skip


def count_mid_blocks(tensors: Mapping[str, Tensor]) -> int:
    return len({key.split(".")[1] for key in tensors if key.startswith("encoder_mids.")})


def infer_block_vae_settings(tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """Settings that the tensors of a checkpoint determine."""

    def layers(block: str) -> int:
        return sum(bool(re.fullmatch(rf"{block}\.residual_input_conv\.\d+\.weight", key)) for key in tensors)

    first = tensors[IDENTIFYING_KEY]
    num_blocks = len({key.split(".")[1] for key in tensors if key.startswith("encoder_layers.")})
    out_channels = [tensors[f"encoder_layers.{i}.residual_input_conv.0.weight"].shape[0] for i in range(num_blocks)]
    widths = (first.shape[0], *out_channels)
    mids = [
        tensors[f"encoder_mids.{i}.residual_input_conv.0.weight"].shape[0] for i in range(count_mid_blocks(tensors))
    ]
    settings: dict[str, Any] = {
        "im_channels": first.shape[1],
        "z_channels": tensors["post_quant_conv.weight"].shape[0],
        "down_channels": widths,
        "mid_channels": (widths[-1], *mids),
        "down_sample": tuple(f"encoder_layers.{i}.down_sample_conv.weight" in tensors for i in range(num_blocks)),
        "attn_down": tuple(f"encoder_layers.{i}.attentions.0.in_proj_weight" in tensors for i in range(num_blocks)),
        "num_down_layers": layers(r"encoder_layers\.0"),
        "num_up_layers": layers(r"decoder_layers\.0"),
    }
    return {**settings, **({"num_mid_layers": layers(r"encoder_mids\.0") - 1} if mids else {})}
