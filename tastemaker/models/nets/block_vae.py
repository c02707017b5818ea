"""The variational autoencoder of explainingai and nanoVLA-RL, under its own names: blocks down, between and up."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .vae import clamp_keep_gradient
from .vae_utils import check_divisible, sample_posterior, split_batch, to_network_range, to_pixels

LATENT_STATS_KEYS = ("mean", "std")  # buffers of ours that its files do not have


@dataclass(frozen=True)
class BlockVaeConfig:
    """Sizes by the names its configurations give them."""

    im_channels: int = 3
    z_channels: int = 4
    down_channels: tuple[int, ...] = (128, 256, 384)
    mid_channels: tuple[int, ...] = (384, 384)  # a block between each two: of one number, there is none
    down_sample: tuple[bool, ...] = (True, True)
    attn_down: tuple[bool, ...] = (False, False)
    norm_channels: int = 32  # groups of channels that are normalised together
    num_heads: int = 4
    num_down_layers: int = 2
    num_mid_layers: int = 2
    num_up_layers: int = 2

    def __post_init__(self) -> None:
        blocks = len(self.down_channels) - 1
        for name, found in (("down_sample", self.down_sample), ("attn_down", self.attn_down)):
            if len(found) != blocks:
                told = f"'{name}' has {len(found)} entries; expected {blocks}, one fewer than 'down_channels'"
                raise ValueError(told)
        if not self.mid_channels or {self.mid_channels[0], self.mid_channels[-1]} != {self.down_channels[-1]}:
            last = self.down_channels[-1]
            raise ValueError(f"'mid_channels' is {list(self.mid_channels)}; expected it to begin and end with {last}")
        odd = [width for width in (*self.down_channels, *self.mid_channels) if width % self.norm_channels]
        if odd:
            raise ValueError(
                f"'norm_channels' is {self.norm_channels}; expected a divisor of every width, also of {odd[0]}"
            )
        pairs = zip(pairwise(self.down_channels), self.attn_down, strict=True)
        attending = [width for pair, on in pairs if on for width in pair]  # the wider going down, the other going up
        odd = [width for width in (*self.mid_channels[1:], *attending) if width % self.num_heads]
        if odd:
            raise ValueError(
                f"'num_heads' is {self.num_heads}; expected a divisor of every width that attends, also of {odd[0]}"
            )

    @property
    def stride(self) -> int:
        """Pixels a latent, each way."""
        return int(2 ** sum(self.down_sample))


def norm_act_conv(before: int, after: int, groups: int) -> nn.Sequential:
    return nn.Sequential(nn.GroupNorm(groups, before), nn.SiLU(), nn.Conv2d(before, after, 3, padding=1))


class BlockVaeBlock(nn.Module):
    """Residual layers, the first so many of them followed by attention, between a way up and a way down."""

    def __init__(self, before: int, after: int, layers: int, attentions: int, shape: BlockVaeConfig) -> None:
        super().__init__()
        widths = [before, *[after] * (layers - 1)]
        groups = shape.norm_channels
        self.resnet_conv_first = nn.ModuleList(norm_act_conv(width, after, groups) for width in widths)
        self.resnet_conv_second = nn.ModuleList(norm_act_conv(after, after, groups) for _ in widths)
        self.residual_input_conv = nn.ModuleList(nn.Conv2d(width, after, 1) for width in widths)
        self.attention_norms = nn.ModuleList(nn.GroupNorm(groups, after) for _ in range(attentions))
        self.attentions = nn.ModuleList(
            nn.MultiheadAttention(after, shape.num_heads, batch_first=True) for _ in range(attentions)
        )
        self.up_sample_conv: nn.Module = nn.Identity()
        self.down_sample_conv: nn.Module = nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        x = self.up_sample_conv(x)
        for place, first in enumerate(self.resnet_conv_first):
            x = self.resnet_conv_second[place](first(x)) + self.residual_input_conv[place](x)
            if place < len(self.attentions):
                x = self._attend(place, x)
        out: Tensor = self.down_sample_conv(x)
        return out

    def _attend(self, place: int, x: Tensor) -> Tensor:
        cells = self.attention_norms[place](x).flatten(2).transpose(1, 2)  # [N, hw, C]
        found: Tensor = self.attentions[place](cells, cells, cells, need_weights=False)[0]
        return x + found.transpose(1, 2).reshape(x.shape)


def down_block(shape: BlockVaeConfig) -> nn.ModuleList:
    blocks = nn.ModuleList()
    for i, (before, after) in enumerate(pairwise(shape.down_channels)):
        attentions = shape.num_down_layers * shape.attn_down[i]
        block = BlockVaeBlock(before, after, shape.num_down_layers, attentions, shape)
        if shape.down_sample[i]:
            block.down_sample_conv = nn.Conv2d(after, after, 4, 2, 1)
        blocks.append(block)
    return blocks


def mid_block(widths: tuple[int, ...], shape: BlockVaeConfig) -> nn.ModuleList:
    layers = shape.num_mid_layers
    return nn.ModuleList(BlockVaeBlock(before, after, layers + 1, layers, shape) for before, after in pairwise(widths))


def up_block(shape: BlockVaeConfig) -> nn.ModuleList:
    blocks = nn.ModuleList()
    for i, (after, before) in reversed([*enumerate(pairwise(shape.down_channels))]):
        attentions = shape.num_up_layers * shape.attn_down[i]
        block = BlockVaeBlock(before, after, shape.num_up_layers, attentions, shape)
        if shape.down_sample[i]:
            block.up_sample_conv = nn.ConvTranspose2d(before, before, 4, 2, 1)
        blocks.append(block)
    return blocks


class BlockVaeNet(nn.Module):
    """Pixels to latents and back; both sides in [0, 1], the network itself in [-1, 1]."""

    mean: Tensor
    std: Tensor
    layout = "authors"

    def __init__(self, shape: BlockVaeConfig, kl: float) -> None:
        super().__init__()
        self.shape, self.kl, self.channels, self.stride = shape, kl, shape.z_channels, shape.stride
        z, first, last, groups = shape.z_channels, shape.down_channels[0], shape.mid_channels[-1], shape.norm_channels
        self.encoder_conv_in = nn.Conv2d(shape.im_channels, first, 3, padding=1)
        self.encoder_layers = down_block(shape)
        self.encoder_mids = mid_block(shape.mid_channels, shape)
        self.encoder_norm_out = nn.GroupNorm(groups, last)
        self.encoder_conv_out = nn.Conv2d(last, 2 * z, 3, padding=1)
        self.pre_quant_conv, self.post_quant_conv = nn.Conv2d(2 * z, 2 * z, 1), nn.Conv2d(z, z, 1)
        self.decoder_conv_in = nn.Conv2d(z, last, 3, padding=1)
        self.decoder_mids = mid_block(shape.mid_channels[::-1], shape)
        self.decoder_layers = up_block(shape)
        self.decoder_norm_out = nn.GroupNorm(groups, first)
        self.decoder_conv_out = nn.Conv2d(first, shape.im_channels, 3, padding=1)
        self.register_buffer("mean", torch.zeros(1, z, 1, 1))
        self.register_buffer("std", torch.ones(1, z, 1, 1))

    def moments(self, pixels: Tensor) -> Tensor:
        """What it believes of latents: means, then logarithms of variances, [N, 2C, h, w] of [N, 3, H, W]."""
        x = self.encoder_conv_in(to_network_range(check_divisible(pixels, self.stride), self.shape.im_channels))
        for block in (*self.encoder_layers, *self.encoder_mids):
            x = block(x)
        out: Tensor = self.pre_quant_conv(self.encoder_conv_out(F.silu(self.encoder_norm_out(x))))
        return out.float()

    def render(self, latents: Tensor) -> Tensor:
        """As the network has it, which may leave [0, 1] a little."""
        x = self.decoder_conv_in(self.post_quant_conv(latents))
        for block in (*self.decoder_mids, *self.decoder_layers):
            x = block(x)
        return to_pixels(self.decoder_conv_out(F.silu(self.decoder_norm_out(x))))

    def forward(self, pixels: Tensor, chance: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The reconstruction and the price of the latents in each row; without chance, of their means once trained."""
        moments = self.moments(pixels)
        if chance is None:
            chance = torch.randn_like(moments[:, : self.channels]) * self.training
        latents, price = sample_posterior(moments, chance)
        return self.render(latents), self.kl * price

    def chances(self, pixels: Tensor) -> tuple[int, ...]:
        return self.channels, pixels.shape[-2] // self.stride, pixels.shape[-1] // self.stride

    def encode(self, pixels: Tensor) -> Tensor:
        """Latents of mean 0 and deviation 1 in every channel, once settled."""
        return (self.moments(pixels)[:, : self.channels] - self.mean) / self.std

    def decode(self, z: Tensor) -> Tensor:
        raw = z * self.std + self.mean
        return clamp_keep_gradient(torch.cat([self.render(part) for part in split_batch(raw, self.stride)]))

    def ending(self) -> nn.Conv2d:
        """The layer that makes pixels."""
        return self.decoder_conv_out

    @torch.no_grad()
    def settle(self, pixels: Tensor) -> None:
        z = torch.cat([self.moments(part)[:, : self.channels] for part in split_batch(pixels)])
        self.mean.copy_(z.mean((0, 2, 3), keepdim=True))
        self.std.copy_(z.std((0, 2, 3), keepdim=True).clamp(min=1e-6))

    def leave(self, out: Path, dtype: torch.dtype) -> None:
        """Write a `.pth` as its own trainer does, whose latents are as they are."""
        tensors = cast("dict[str, Tensor]", self.state_dict())
        kept = {
            key: x.detach().to(dtype, copy=True).cpu() for key, x in tensors.items() if key not in LATENT_STATS_KEYS
        }
        torch.save(kept, out)
