"""MAGVIT-v2's image tokenizer as published with Show-o: a convolutional autoencoder with lookup-free quantization."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .vae import split_batch
from .vq import AttnBlock, Downsample, LookupFreeQuantizer, ResnetBlock, Upsample, group_norm


@dataclass(frozen=True)
class MagvitStages:
    """Channel multipliers and residual blocks of each level of encoder or decoder, the finest level first."""

    channel_multipliers: tuple[int, ...]
    num_res_blocks: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.channel_multipliers) != len(self.num_res_blocks):
            levels, blocks = len(self.channel_multipliers), len(self.num_res_blocks)
            raise ValueError(
                f"expected one multiplier and one block count per level, got {levels} multipliers and {blocks} "
                "block counts; make 'channel_multipliers' and 'num_res_blocks' equally long [TM481]"
            )


@dataclass(frozen=True)
class MagvitConfig:
    """Sizes of a tokenizer; the defaults are the published ones."""

    channels: int = 128
    bits: int = 13
    encoder: MagvitStages = MagvitStages((1, 2, 2, 4, 4), (4, 3, 4, 3, 4))
    decoder: MagvitStages = MagvitStages((1, 1, 2, 2, 4), (4, 4, 3, 4, 3))
    norm_num_groups: int = 32

    @property
    def codebook_size(self) -> int:
        return int(2**self.bits)

    @property
    def stride(self) -> int:
        """Pixels per token, in each direction."""
        return int(2 ** (len(self.encoder.num_res_blocks) - 1))


class MagvitLevel(nn.Module):
    """Residual blocks at one resolution, then the change to the next resolution."""

    def __init__(self, in_channels: int, out_channels: int, blocks: int, groups: int) -> None:
        super().__init__()
        self.block = nn.ModuleList(
            ResnetBlock(in_channels if i == 0 else out_channels, out_channels, groups) for i in range(blocks)
        )
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
    def __init__(self, config: MagvitConfig) -> None:
        super().__init__()
        widths = [config.channels * multiplier for multiplier in config.encoder.channel_multipliers]
        self.conv_in = nn.Conv2d(3, config.channels, 3, padding=1)
        self.down = nn.ModuleList()
        for i, width in enumerate(widths):
            in_channels = widths[i - 1] if i else config.channels
            level = MagvitLevel(in_channels, width, config.encoder.num_res_blocks[i], config.norm_num_groups)
            level.downsample = nn.Identity() if i == len(widths) - 1 else Downsample(width)
            self.down.append(level)
        self.mid = MagvitMiddle(widths[-1], config.norm_num_groups)
        self.norm_out = group_norm(widths[-1], config.norm_num_groups)
        self.conv_out = nn.Conv2d(widths[-1], config.bits, 3, padding=1)
        self.quant_conv = nn.Conv2d(config.bits, config.bits, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv_in(x)
        for level in self.down:
            x = level(x)
        out: Tensor = self.quant_conv(self.conv_out(F.silu(self.norm_out(self.mid(x)))))
        return out


class MagvitDecoder(nn.Module):
    def __init__(self, config: MagvitConfig) -> None:
        super().__init__()
        widths = [config.channels * multiplier for multiplier in config.decoder.channel_multipliers]
        self.post_quant_conv = nn.Conv2d(config.bits, config.bits, 1)
        self.conv_in = nn.Conv2d(config.bits, widths[-1], 3, padding=1)
        self.mid = MagvitMiddle(widths[-1], config.norm_num_groups)
        self.up = nn.ModuleList()
        for i, width in enumerate(widths):
            in_channels = widths[min(i + 1, len(widths) - 1)]
            level = MagvitLevel(in_channels, width, config.decoder.num_res_blocks[i], config.norm_num_groups)
            level.upsample = Upsample(width) if i else nn.Identity()
            self.up.append(level)
        self.norm_out = group_norm(widths[0], config.norm_num_groups)
        self.conv_out = nn.Conv2d(widths[0], 3, 3, padding=1)

    def forward(self, z: Tensor) -> Tensor:
        x = self.mid(self.conv_in(self.post_quant_conv(z)))
        for level in reversed(list(self.up)):
            x = level(x)
        out: Tensor = self.conv_out(F.silu(self.norm_out(x)))
        return out


class LFQTables(nn.Module):
    """Lookup-free quantization, with the tables that published files hold as buffers."""

    embedding: Tensor
    power_vals: Tensor

    def __init__(self, codebook_size: int) -> None:
        super().__init__()
        self.signs = LookupFreeQuantizer(codebook_size)
        self.register_buffer("embedding", self.signs.lookup(torch.arange(codebook_size)))  # [codes, bits]
        self.register_buffer("power_vals", 2 ** torch.arange(self.signs.bits - 1, -1, -1))


class Magvit(nn.Module):
    """Pixels in [0, 1] to tokens and back; the network itself works in [-1, 1]."""

    def __init__(self, config: MagvitConfig) -> None:
        super().__init__()
        self.config = config
        self.encoder, self.decoder = MagvitEncoder(config), MagvitDecoder(config)
        self.quantize = LFQTables(config.codebook_size)

    def encode_continuous(self, pixels: Tensor) -> Tensor:
        """Latents in_channels quantization: [N, bits, h, w] of [N, 3, H, W]."""
        out: Tensor = self.encoder(2 * pixels - 1)
        return out

    def encode(self, pixels: Tensor) -> Tensor:
        """Tokens [N, h * w], row by row."""
        return self.quantize.signs.assign_codes(self.encode_continuous(pixels))

    def decode(self, ids: Tensor, size: tuple[int, int] | None = None) -> Tensor:
        """Pixels [N, 3, H, W] of tokens; `size` is the height and width in tokens, by default those of a square."""
        height, width = size or (math.isqrt(ids.shape[1]),) * 2
        chunks = split_batch(ids.reshape(len(ids), height, width), self.config.stride)
        return torch.cat([self._decode(chunk) for chunk in chunks])

    def _decode(self, ids: Tensor) -> Tensor:
        pixels: Tensor = self.decoder(self.quantize.signs.lookup(ids).permute(0, 3, 1, 2)).float()
        return (pixels / 2 + 0.5).clamp(0, 1)
