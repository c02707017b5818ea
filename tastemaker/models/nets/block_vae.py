"""The variational autoencoder of explainingai and nanoVLA-RL, in its published layout."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .vae import VariationalAutoencoder, check_divisible, split_batch, to_network_range, to_pixels

LATENT_STATS_KEYS = ("mean", "std")  # our buffers, which published files do not have


@dataclass(frozen=True)
class BlockVaeConfig:
    """Sizes, by the names of the published configurations."""

    im_channels: int = 3
    z_channels: int = 4
    down_channels: tuple[int, ...] = (128, 256, 384)
    mid_channels: tuple[int, ...] = (384, 384)  # one block per neighboring pair
    down_sample: tuple[bool, ...] = (True, True)
    attn_down: tuple[bool, ...] = (False, False)
    norm_channels: int = 32  # number of groups of the group norms
    num_heads: int = 4
    num_down_layers: int = 2
    num_mid_layers: int = 2
    num_up_layers: int = 2

    def __post_init__(self) -> None:
        blocks = len(self.down_channels) - 1
        for name, flags in (("down_sample", self.down_sample), ("attn_down", self.attn_down)):
            if len(flags) != blocks:
                expected = f"expected {blocks}, one less than 'down_channels' has"
                raise ValueError(f"'{name}' has {len(flags)} entries; {expected} [TM474]")
        if not self.mid_channels or {self.mid_channels[0], self.mid_channels[-1]} != {self.down_channels[-1]}:
            last = self.down_channels[-1]
            raise ValueError(
                f"'mid_channels': expected {last} as the first and the last entry, got {list(self.mid_channels)}; "
                "correct 'mid_channels' [TM475]"
            )
        odd = [width for width in (*self.down_channels, *self.mid_channels) if width % self.norm_channels]
        if odd:
            raise ValueError(
                f"'norm_channels': expected a divisor of all widths, but {self.norm_channels} does not divide "
                f"{odd[0]}; change 'norm_channels' [TM476]"
            )
        pairs = zip(pairwise(self.down_channels), self.attn_down, strict=True)
        attended = [width for pair, on in pairs if on for width in pair]  # in the encoder and in the decoder
        odd = [width for width in (*self.mid_channels[1:], *attended) if width % self.num_heads]
        if odd:
            raise ValueError(
                f"'num_heads': expected a divisor of all widths with attention, but {self.num_heads} does not "
                f"divide {odd[0]}; change 'num_heads' [TM477]"
            )

    @property
    def stride(self) -> int:
        """Pixels per latent, in each direction."""
        return int(2 ** sum(self.down_sample))


def norm_act_conv(in_channels: int, out_channels: int, groups: int) -> nn.Sequential:
    return nn.Sequential(
        nn.GroupNorm(groups, in_channels), nn.SiLU(), nn.Conv2d(in_channels, out_channels, 3, padding=1)
    )


class BlockVaeBlock(nn.Module):
    """Optional upsampling, residual layers, of which the first `attentions` have attention, optional downsampling."""

    def __init__(
        self, in_channels: int, out_channels: int, layers: int, attentions: int, config: BlockVaeConfig
    ) -> None:
        super().__init__()
        widths = [in_channels, *[out_channels] * (layers - 1)]
        groups = config.norm_channels
        self.resnet_conv_first = nn.ModuleList(norm_act_conv(width, out_channels, groups) for width in widths)
        self.resnet_conv_second = nn.ModuleList(norm_act_conv(out_channels, out_channels, groups) for _ in widths)
        self.residual_input_conv = nn.ModuleList(nn.Conv2d(width, out_channels, 1) for width in widths)
        self.attention_norms = nn.ModuleList(nn.GroupNorm(groups, out_channels) for _ in range(attentions))
        self.attentions = nn.ModuleList(
            nn.MultiheadAttention(out_channels, config.num_heads, batch_first=True) for _ in range(attentions)
        )
        self.up_sample_conv: nn.Module = nn.Identity()
        self.down_sample_conv: nn.Module = nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        x = self.up_sample_conv(x)
        for i, first in enumerate(self.resnet_conv_first):
            x = self.resnet_conv_second[i](first(x)) + self.residual_input_conv[i](x)
            if i < len(self.attentions):
                x = self._attend(i, x)
        out: Tensor = self.down_sample_conv(x)
        return out

    def _attend(self, i: int, x: Tensor) -> Tensor:
        tokens = self.attention_norms[i](x).flatten(2).transpose(1, 2)  # [N, hw, C]
        mixed: Tensor = self.attentions[i](tokens, tokens, tokens, need_weights=False)[0]
        return x + mixed.transpose(1, 2).reshape(x.shape)


def build_down_blocks(config: BlockVaeConfig) -> nn.ModuleList:
    blocks = nn.ModuleList()
    for i, (in_channels, out_channels) in enumerate(pairwise(config.down_channels)):
        attentions = config.num_down_layers * config.attn_down[i]
        block = BlockVaeBlock(in_channels, out_channels, config.num_down_layers, attentions, config)
        if config.down_sample[i]:
            block.down_sample_conv = nn.Conv2d(out_channels, out_channels, 4, 2, 1)
        blocks.append(block)
    return blocks


def build_mid_blocks(widths: tuple[int, ...], config: BlockVaeConfig) -> nn.ModuleList:
    layers = config.num_mid_layers
    return nn.ModuleList(
        BlockVaeBlock(in_channels, out_channels, layers + 1, layers, config)
        for in_channels, out_channels in pairwise(widths)
    )


def build_up_blocks(config: BlockVaeConfig) -> nn.ModuleList:
    blocks = nn.ModuleList()
    for i, (out_channels, in_channels) in reversed([*enumerate(pairwise(config.down_channels))]):
        attentions = config.num_up_layers * config.attn_down[i]
        block = BlockVaeBlock(in_channels, out_channels, config.num_up_layers, attentions, config)
        if config.down_sample[i]:
            block.up_sample_conv = nn.ConvTranspose2d(in_channels, in_channels, 4, 2, 1)
        blocks.append(block)
    return blocks


class BlockVaeNet(VariationalAutoencoder):
    """Pixels in [0, 1] to latents and back; the network itself works in [-1, 1]."""

    export_format = "authors"

    def __init__(self, config: BlockVaeConfig, kl_weight: float) -> None:
        super().__init__()
        self.config, self.kl_weight, self.channels, self.stride = config, kl_weight, config.z_channels, config.stride
        z, first, last, groups = (
            config.z_channels,
            config.down_channels[0],
            config.mid_channels[-1],
            config.norm_channels,
        )
        self.encoder_conv_in = nn.Conv2d(config.im_channels, first, 3, padding=1)
        self.encoder_layers = build_down_blocks(config)
        self.encoder_mids = build_mid_blocks(config.mid_channels, config)
        self.encoder_norm_out = nn.GroupNorm(groups, last)
        self.encoder_conv_out = nn.Conv2d(last, 2 * z, 3, padding=1)
        self.pre_quant_conv, self.post_quant_conv = nn.Conv2d(2 * z, 2 * z, 1), nn.Conv2d(z, z, 1)
        self.decoder_conv_in = nn.Conv2d(z, last, 3, padding=1)
        self.decoder_mids = build_mid_blocks(config.mid_channels[::-1], config)
        self.decoder_layers = build_up_blocks(config)
        self.decoder_norm_out = nn.GroupNorm(groups, first)
        self.decoder_conv_out = nn.Conv2d(first, config.im_channels, 3, padding=1)
        self.register_buffer("mean", torch.zeros(1, z, 1, 1))
        self.register_buffer("std", torch.ones(1, z, 1, 1))

    def moments(self, pixels: Tensor) -> Tensor:
        x = self.encoder_conv_in(to_network_range(check_divisible(pixels, self.stride), self.config.im_channels))
        for block in (*self.encoder_layers, *self.encoder_mids):
            x = block(x)
        out: Tensor = self.pre_quant_conv(self.encoder_conv_out(F.silu(self.encoder_norm_out(x))))
        return out.float()

    def decode_unclamped(self, latents: Tensor) -> Tensor:
        x = self.decoder_conv_in(self.post_quant_conv(latents))
        for block in (*self.decoder_mids, *self.decoder_layers):
            x = block(x)
        return to_pixels(self.decoder_conv_out(F.silu(self.decoder_norm_out(x))))

    def last_layer(self) -> nn.Conv2d:
        return self.decoder_conv_out

    @torch.no_grad()
    def measure_latents(self, pixels: Tensor) -> None:
        z = torch.cat([self.moments(part)[:, : self.channels] for part in split_batch(pixels)])
        self.mean.copy_(z.mean((0, 2, 3), keepdim=True))
        self.std.copy_(z.std((0, 2, 3), keepdim=True).clamp(min=1e-6))

    def export(self, out: Path, dtype: torch.dtype) -> None:
        """Write a `.pth` file as the published trainer does, without the statistics of the latents."""
        tensors = cast("dict[str, Tensor]", self.state_dict())
        kept = {
            key: x.detach().to(dtype, copy=True).cpu() for key, x in tensors.items() if key not in LATENT_STATS_KEYS
        }
        torch.save(kept, out)
