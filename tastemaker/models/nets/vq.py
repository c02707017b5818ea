"""LlamaGen's picture tokenizer, in its published layout: a convolutional autoencoder around a quantiser."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .quantizers import LookupFreeQuantizer, VectorQuantizer

BATCH_PIXELS = 2**20  # pixels decoded together: 16 pictures of 256 a side


@dataclass(frozen=True)
class VQConfig:
    """Sizes of a tokenizer, and what its training weighs; as given, VQ-16, and VQ-8 with multipliers 1, 2, 2, 4."""

    channels: int = 128
    multipliers: tuple[int, ...] = (1, 1, 2, 2, 4)  # of the channels, one a level; each level but the first halves
    blocks: int = 2  # a level
    latent: int = 256  # channels around the quantiser
    codes: int = 16384
    width: int = 8  # of a code; signs need none
    quantizer: Literal["codebook", "signs"] = "codebook"
    groups: int = 32  # of channels that are normalised together; of one channel each, a picture's own colours are lost
    commitment: float = 0.25
    entropy: float = 0.0
    idle: float = 1.0  # weight of drawing unused codes to the pictures

    def __post_init__(self) -> None:
        if self.quantizer == "signs" and (self.codes < 2 or self.codes & (self.codes - 1)):
            raise ValueError(f"'codes' is {self.codes}; signs need a power of two")
        if self.channels % self.groups:
            raise ValueError(f"'channels' is {self.channels}; expected a multiple of 'groups', which is {self.groups}")

    @property
    def stride(self) -> int:
        """Pixels a token, each way."""
        return int(2 ** (len(self.multipliers) - 1))


def group_norm(channels: int, groups: int) -> nn.GroupNorm:
    return nn.GroupNorm(groups, channels, eps=1e-6)


class ResnetBlock(nn.Module):
    def __init__(self, before: int, after: int, groups: int) -> None:
        super().__init__()
        self.norm1, self.conv1 = group_norm(before, groups), nn.Conv2d(before, after, 3, padding=1)
        self.norm2, self.conv2 = group_norm(after, groups), nn.Conv2d(after, after, 3, padding=1)
        self.nin_shortcut = nn.Conv2d(before, after, 1) if before != after else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        h = self.conv1(F.silu(self.norm1(x)))
        out: Tensor = self.nin_shortcut(x) + self.conv2(F.silu(self.norm2(h)))
        return out


class AttnBlock(nn.Module):
    """Every cell looks at every other, with one head."""

    def __init__(self, channels: int, groups: int) -> None:
        super().__init__()
        self.norm = group_norm(channels, groups)
        self.q, self.k, self.v = (nn.Conv2d(channels, channels, 1) for _ in range(3))
        self.proj_out = nn.Conv2d(channels, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        q, k, v = (part(h).flatten(2).transpose(1, 2)[:, None] for part in (self.q, self.k, self.v))  # [N, 1, hw, C]
        mixed = F.scaled_dot_product_attention(q, k, v)[:, 0].transpose(1, 2).reshape(x.shape)
        out: Tensor = x + self.proj_out(mixed)
        return out


class Downsample(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, stride=2)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.conv(F.pad(x, (0, 1, 0, 1)))
        return out


class Upsample(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.conv(F.interpolate(x, scale_factor=2.0, mode="nearest"))
        return out


class VQLevel(nn.Module):
    """Blocks at one resolution, each followed by attention if asked for, and the way to the next."""

    def __init__(self, before: int, after: int, blocks: int, groups: int, *, attention: bool) -> None:
        super().__init__()
        self.res = nn.ModuleList(ResnetBlock(before if i == 0 else after, after, groups) for i in range(blocks))
        self.attn = nn.ModuleList(AttnBlock(after, groups) for _ in range(blocks if attention else 0))
        self.downsample: nn.Module = nn.Identity()
        self.upsample: nn.Module = nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        for i, block in enumerate(self.res):
            x = block(x)
            if len(self.attn):
                x = self.attn[i](x)
        out: Tensor = self.upsample(self.downsample(x))
        return out


def mid_blocks(channels: int, groups: int) -> nn.ModuleList:
    first, last = (ResnetBlock(channels, channels, groups) for _ in range(2))
    return nn.ModuleList([first, AttnBlock(channels, groups), last])


class VQEncoder(nn.Module):
    def __init__(self, shape: VQConfig) -> None:
        super().__init__()
        widths = [shape.channels * multiplier for multiplier in shape.multipliers]
        self.conv_in = nn.Conv2d(3, shape.channels, 3, padding=1)
        self.conv_blocks = nn.ModuleList()
        for i, width in enumerate(widths):
            last = i == len(widths) - 1
            before = widths[i - 1] if i else shape.channels
            level = VQLevel(before, width, shape.blocks, shape.groups, attention=last)
            level.downsample = nn.Identity() if last else Downsample(width)
            self.conv_blocks.append(level)
        self.mid = mid_blocks(widths[-1], shape.groups)
        self.norm_out, self.conv_out = (
            group_norm(widths[-1], shape.groups),
            nn.Conv2d(widths[-1], shape.latent, 3, padding=1),
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv_in(x)
        for block in (*self.conv_blocks, *self.mid):
            x = block(x)
        out: Tensor = self.conv_out(F.silu(self.norm_out(x)))
        return out


class VQDecoder(nn.Module):
    def __init__(self, shape: VQConfig) -> None:
        super().__init__()
        widths = [shape.channels * multiplier for multiplier in reversed(shape.multipliers)]
        self.conv_in = nn.Conv2d(shape.latent, widths[0], 3, padding=1)
        self.mid = mid_blocks(widths[0], shape.groups)
        self.conv_blocks = nn.ModuleList()
        for i, width in enumerate(widths):
            level = VQLevel(widths[max(i - 1, 0)], width, shape.blocks + 1, shape.groups, attention=i == 0)
            level.upsample = nn.Identity() if i == len(widths) - 1 else Upsample(width)
            self.conv_blocks.append(level)
        self.norm_out, self.conv_out = group_norm(widths[-1], shape.groups), nn.Conv2d(widths[-1], 3, 3, padding=1)

    def forward(self, z: Tensor) -> Tensor:
        x = self.conv_in(z)
        for block in (*self.mid, *self.conv_blocks):
            x = block(x)
        out: Tensor = self.conv_out(F.silu(self.norm_out(x)))
        return out


class VQ(nn.Module):
    """Pixels to tokens and back; both sides in [0, 1], the network itself in [-1, 1]."""

    def __init__(self, shape: VQConfig) -> None:
        super().__init__()
        self.shape = shape
        signs = shape.quantizer == "signs"
        width = int(math.log2(shape.codes)) if signs else shape.width
        self.encoder, self.decoder = VQEncoder(shape), VQDecoder(shape)
        self.quantize: VectorQuantizer | LookupFreeQuantizer = (
            LookupFreeQuantizer(shape.codes) if signs else VectorQuantizer(shape.codes, width)
        )
        self.quant_conv, self.post_quant_conv = nn.Conv2d(shape.latent, width, 1), nn.Conv2d(width, shape.latent, 1)

    @property
    def stride(self) -> int:
        return self.shape.stride

    def latents(self, pixels: Tensor) -> Tensor:
        """What is quantised: [N, C, h, w] of [N, 3, H, W]."""
        out: Tensor = self.quant_conv(self.encoder(2 * pixels - 1))
        return out

    def vectors(self, ids: Tensor) -> Tensor:
        """What tokens [N, h * w] stand for: [N, h * w, C]."""
        return self.quantize.look_up(ids)

    def encode(self, pixels: Tensor) -> Tensor:
        """Tokens [N, h * w], row by row."""
        return self.quantize.choose(self.latents(pixels))

    def decode(self, ids: Tensor) -> Tensor:
        """Pixels [N, 3, H, W] of square pictures; few at a time, for what lies between takes many times their size."""
        side = math.isqrt(ids.shape[1])
        rows = max(1, BATCH_PIXELS // (side * self.shape.stride) ** 2)
        return torch.cat([self._decode(part, side) for part in torch.split(ids, rows)])

    def _decode(self, ids: Tensor, side: int) -> Tensor:
        vectors = self.quantize.look_up(ids).transpose(1, 2)
        return self.render(vectors.reshape(len(ids), -1, side, side)).clamp(0, 1)

    def render(self, latents: Tensor) -> Tensor:
        """As the network has it, which may leave [0, 1] a little."""
        pixels: Tensor = self.decoder(self.post_quant_conv(latents)).float()
        return (pixels + 1) / 2

    def forward(self, pixels: Tensor) -> tuple[Tensor, Tensor]:
        """The reconstruction, its gradient passed straight through the choice of tokens, and what else to minimise."""
        found, shape = self.quantize(self.latents(pixels)), self.shape
        extra = found.nearness + shape.commitment * found.commitment + shape.entropy * found.entropy
        return self.render(found.latent), extra + shape.idle * found.idle

    def ending(self) -> nn.Conv2d:
        """The layer that makes pixels."""
        return self.decoder.conv_out

    @torch.no_grad()
    def share(self, pixels: Tensor) -> float:
        """How many of the codes some pictures use, of all."""
        counts = torch.bincount(self.encode(pixels).flatten(), minlength=self.shape.codes)
        return (counts > 0).float().mean().item()


def drop_usage_buffer(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Published weights without the ring buffer of used codes that came with them."""
    return {key: value for key, value in tensors.items() if key != "quantize.codebook_used"}
