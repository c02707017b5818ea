"""MAGVIT-v2's picture tokenizer as Show-o published it: a convolutional autoencoder around the signs of 13 channels."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .quantizers import LookupFreeQuantizer
from .vq import BATCH_PIXELS, AttnBlock, Downsample, ResnetBlock, Upsample, group_norm


@dataclass(frozen=True)
class MagvitStages:
    """Sizes of one half: multipliers of the channels and blocks of each level, the finest first."""

    multipliers: tuple[int, ...]
    blocks: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.multipliers) != len(self.blocks):
            raise ValueError(f"found {len(self.multipliers)} multipliers, {len(self.blocks)} blocks; both are by level")


@dataclass(frozen=True)
class MagvitConfig:
    """Sizes of a tokenizer; as given, those published."""

    channels: int = 128
    bits: int = 13
    encoder: MagvitStages = MagvitStages((1, 2, 2, 4, 4), (4, 3, 4, 3, 4))
    decoder: MagvitStages = MagvitStages((1, 1, 2, 2, 4), (4, 4, 3, 4, 3))
    groups: int = 32  # of channels that are normalised together

    @property
    def codes(self) -> int:
        return int(2**self.bits)

    @property
    def stride(self) -> int:
        """Pixels a token, each way."""
        return int(2 ** (len(self.encoder.blocks) - 1))


class MagvitLevel(nn.Module):
    """Blocks at one resolution and the way to the next."""

    def __init__(self, before: int, after: int, blocks: int, groups: int) -> None:
        super().__init__()
        self.block = nn.ModuleList(ResnetBlock(before if i == 0 else after, after, groups) for i in range(blocks))
        self.downsample: nn.Module = nn.Identity()
        self.upsample: nn.Module = nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        for block in self.block:
            x = block(x)
        out: Tensor = self.upsample(self.downsample(x))
        return out


class MagvitMiddle(nn.Module):
    def __init__(self, channels: int, groups: int) -> None:
        super().__init__()
        self.block_1, self.block_2 = (ResnetBlock(channels, channels, groups) for _ in range(2))
        self.attn_1 = AttnBlock(channels, groups)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.block_2(self.attn_1(self.block_1(x)))
        return out


class MagvitEncoder(nn.Module):
    def __init__(self, shape: MagvitConfig) -> None:
        super().__init__()
        widths = [shape.channels * multiplier for multiplier in shape.encoder.multipliers]
        self.conv_in = nn.Conv2d(3, shape.channels, 3, padding=1)
        self.down = nn.ModuleList()
        for i, width in enumerate(widths):
            level = MagvitLevel(widths[i - 1] if i else shape.channels, width, shape.encoder.blocks[i], shape.groups)
            level.downsample = nn.Identity() if i == len(widths) - 1 else Downsample(width)
            self.down.append(level)
        self.mid = MagvitMiddle(widths[-1], shape.groups)
        self.norm_out, self.conv_out = (
            group_norm(widths[-1], shape.groups),
            nn.Conv2d(widths[-1], shape.bits, 3, padding=1),
        )
        self.quant_conv = nn.Conv2d(shape.bits, shape.bits, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv_in(x)
        for level in self.down:
            x = level(x)
        out: Tensor = self.quant_conv(self.conv_out(F.silu(self.norm_out(self.mid(x)))))
        return out


class MagvitDecoder(nn.Module):
    def __init__(self, shape: MagvitConfig) -> None:
        super().__init__()
        widths = [shape.channels * multiplier for multiplier in shape.decoder.multipliers]
        self.post_quant_conv = nn.Conv2d(shape.bits, shape.bits, 1)
        self.conv_in = nn.Conv2d(shape.bits, widths[-1], 3, padding=1)
        self.mid = MagvitMiddle(widths[-1], shape.groups)
        self.up = nn.ModuleList()
        for i, width in enumerate(widths):
            before = widths[min(i + 1, len(widths) - 1)]
            level = MagvitLevel(before, width, shape.decoder.blocks[i], shape.groups)
            level.upsample = Upsample(width) if i else nn.Identity()
            self.up.append(level)
        self.norm_out, self.conv_out = group_norm(widths[0], shape.groups), nn.Conv2d(widths[0], 3, 3, padding=1)

    def forward(self, z: Tensor) -> Tensor:
        x = self.mid(self.conv_in(self.post_quant_conv(z)))
        for level in reversed(list(self.up)):
            x = level(x)
        out: Tensor = self.conv_out(F.silu(self.norm_out(x)))
        return out


class LFQTables(nn.Module):
    """The signs of channels, with the tables that published files hold of them."""

    embedding: Tensor
    power_vals: Tensor

    def __init__(self, codes: int) -> None:
        super().__init__()
        self.signs = LookupFreeQuantizer(codes)
        self.register_buffer("embedding", self.signs.look_up(torch.arange(codes)))  # [codes, bits]
        self.register_buffer("power_vals", 2 ** torch.arange(self.signs.bits - 1, -1, -1))


class Magvit(nn.Module):
    """Pixels to tokens and back; both sides in [0, 1], the network itself in [-1, 1]."""

    def __init__(self, shape: MagvitConfig) -> None:
        super().__init__()
        self.shape = shape
        self.encoder, self.decoder, self.quantize = MagvitEncoder(shape), MagvitDecoder(shape), LFQTables(shape.codes)

    def latents(self, pixels: Tensor) -> Tensor:
        """What is quantised: [N, bits, h, w] of [N, 3, H, W]."""
        out: Tensor = self.encoder(2 * pixels - 1)
        return out

    def encode(self, pixels: Tensor) -> Tensor:
        """Tokens [N, h * w], row by row."""
        return self.quantize.signs.choose(self.latents(pixels))

    def decode(self, ids: Tensor, size: tuple[int, int] | None = None) -> Tensor:
        """Pixels [N, 3, H, W] of pictures of so many tokens down and across, of square ones if not said."""
        height, width = size or (math.isqrt(ids.shape[1]),) * 2
        rows = max(
            1, BATCH_PIXELS // (ids.shape[1] * self.shape.stride**2)
        )  # what lies between is many times their size
        return torch.cat([self._decode(part, height, width) for part in torch.split(ids, rows)])

    def _decode(self, ids: Tensor, height: int, width: int) -> Tensor:
        vectors = self.quantize.signs.look_up(ids).transpose(1, 2)
        pixels: Tensor = self.decoder(vectors.reshape(len(ids), -1, height, width)).float()
        return (pixels / 2 + 0.5).clamp(0, 1)
