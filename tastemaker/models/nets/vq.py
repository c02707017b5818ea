"""LlamaGen's image tokenizer in its published layout: a convolutional autoencoder around a quantizer."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...core.autoencoder import AutoencoderNet
from .vae import split_batch


@dataclass(frozen=True)
class VQConfig:
    """Sizes of a tokenizer and weights of its losses; the defaults are VQ-16, and VQ-8 with multipliers 1, 2, 2, 4."""

    channels: int = 128
    channel_multipliers: tuple[int, ...] = (1, 1, 2, 2, 4)  # one per level; each level but the first halves the size
    num_res_blocks: int = 2  # per level
    z_channels: int = 256  # channels before and after the quantizer's projections
    codebook_size: int = 16384
    codebook_dim: int = 8  # of a codebook vector; LFQ has log2(codebook_size)
    quantizer: Literal["codebook", "lfq"] = "codebook"
    norm_num_groups: int = 32  # with one channel per group the colors of an image would be lost
    commitment_weight: float = 0.25
    entropy_weight: float = 0.0
    dead_code_weight: float = 1.0  # of the loss that moves unused codebook vectors to the data

    def __post_init__(self) -> None:
        if self.quantizer == "lfq" and (self.codebook_size < 2 or self.codebook_size & (self.codebook_size - 1)):
            raise ValueError(
                f"'codebook_size': expected a power of two for the quantizer lfq, got {self.codebook_size}; "
                "change 'codebook_size' [TM486]"
            )
        if self.channels % self.norm_num_groups:
            groups = self.norm_num_groups
            raise ValueError(
                f"'channels': expected a multiple of 'norm_num_groups' ({groups}), got {self.channels}; change "
                "'channels' [TM487]"
            )

    @property
    def stride(self) -> int:
        """Pixels per token, in each direction."""
        return int(2 ** (len(self.channel_multipliers) - 1))


@dataclass(frozen=True)
class QuantizerOutput:
    latent: Tensor  # [N, C, h, w] quantized, with a straight-through gradient to the input
    ids: Tensor  # [N, h * w]
    codebook_loss: Tensor  # scalar: squared distance of the chosen codes from the input
    commitment_loss: Tensor  # scalar: squared distance of the input from the chosen codes
    entropy_loss: Tensor  # scalar: low if each assignment is certain and all codes are used equally
    dead_code_loss: Tensor  # scalar: squared distance of unused codes from their nearest input


def flatten_spatial(z: Tensor) -> Tensor:
    """[N, C, h, w] to [N * h * w, C], row by row."""
    return z.permute(0, 2, 3, 1).flatten(0, 2)


def unflatten_spatial(vectors: Tensor, like: Tensor) -> Tensor:
    """[N * h * w, C] to the shape [N, C, h, w] of `like`."""
    n, c, h, w = like.shape
    return vectors.view(n, h, w, c).permute(0, 3, 1, 2)


def entropy_loss(logits: Tensor) -> Tensor:
    """Mean entropy of the assignments minus the entropy of their mean (MAGVIT, LlamaGen), from logits [n, codes]."""
    probabilities = logits.softmax(-1)
    entropy = -(probabilities * logits.log_softmax(-1)).sum(-1).mean()
    mean = probabilities.mean(0)
    return entropy + (mean * (mean + 1e-5).log()).sum()


class VectorQuantizer(nn.Module):
    """Nearest neighbor in a codebook of L2-normalized vectors."""

    def __init__(self, codebook_size: int, dim: int, temperature: float = 0.01) -> None:
        super().__init__()
        self.temperature = temperature
        self.embedding = nn.Embedding(codebook_size, dim)
        # Short vectors turn fast at first, but must not be so short that their gradients dominate all others.
        nn.init.normal_(self.embedding.weight, std=0.02)

    def normalized_codebook(self) -> Tensor:
        """All codebook vectors: [codes, C]."""
        return F.normalize(self.embedding.weight.float(), dim=-1)

    def lookup(self, ids: Tensor) -> Tensor:
        """Codebook vectors [..., C] of token ids [...]."""
        return F.normalize(self.embedding(ids).float(), dim=-1)

    def _distances(self, z: Tensor, codebook: Tensor) -> Tensor:
        """Squared distances [n, codes], never in half precision, which would choose other tokens."""
        with torch.autocast(z.device.type, enabled=False):
            return z.square().sum(1, keepdim=True) + codebook.square().sum(1) - 2 * z @ codebook.T

    def assign_codes(self, z: Tensor) -> Tensor:
        """Token ids [N, h * w] of latents [N, C, h, w]."""
        vectors = F.normalize(flatten_spatial(z.float()), dim=-1)
        return self._distances(vectors, self.normalized_codebook()).argmin(1).view(len(z), -1)

    def forward(self, z: Tensor) -> QuantizerOutput:
        vectors, codebook = F.normalize(flatten_spatial(z.float()), dim=-1), self.normalized_codebook()
        distances = self._distances(vectors, codebook)
        ids = distances.argmin(1)
        chosen = codebook[ids]
        latent = vectors + (chosen - vectors).detach()
        used = torch.zeros(len(codebook), device=z.device).index_fill_(0, ids, 1.0)
        # The codebook loss reaches chosen codes only, so that a codebook collapses without a loss for the others.
        unused = (codebook - vectors.detach()[distances.argmin(0)]).square().mean(1) * (1 - used)
        return QuantizerOutput(
            unflatten_spatial(latent, z),
            ids.view(len(z), -1),
            (chosen - vectors.detach()).square().mean(),
            (chosen.detach() - vectors).square().mean(),
            entropy_loss(-distances / self.temperature),
            unused.mean(),
        )


class LookupFreeQuantizer(nn.Module):
    """Lookup-free quantization (MAGVIT-v2): a bit per channel, 1 if positive; the first is the most significant."""

    def __init__(self, codebook_size: int, temperature: float = 0.1) -> None:
        super().__init__()
        self.bits, self.temperature = int(math.log2(codebook_size)), temperature

    def _powers(self, device: torch.device) -> Tensor:
        return 2 ** torch.arange(self.bits - 1, -1, -1, device=device)

    def lookup(self, ids: Tensor) -> Tensor:
        """Vectors [..., bits] of -1 and 1 of token ids [...]."""
        return (ids[..., None] & self._powers(ids.device)).ne(0).float() * 2 - 1

    def assign_codes(self, z: Tensor) -> Tensor:
        """Token ids [N, h * w] of latents [N, bits, h, w]."""
        return ((flatten_spatial(z) > 0).long() * self._powers(z.device)).sum(1).view(len(z), -1)

    def forward(self, z: Tensor) -> QuantizerOutput:
        vectors, ids = flatten_spatial(z.float()), self.assign_codes(z)
        chosen = self.lookup(ids.flatten())
        codebook = self.lookup(torch.arange(2**self.bits, device=z.device))
        with torch.autocast(z.device.type, enabled=False):
            logits = 2 * vectors @ codebook.T / self.temperature / self.bits
        commitment = (chosen - vectors).square().mean()
        zero = torch.zeros((), device=z.device)
        latent = vectors + (chosen - vectors).detach()
        return QuantizerOutput(unflatten_spatial(latent, z), ids, zero, commitment, entropy_loss(logits), zero)


def group_norm(channels: int, groups: int) -> nn.GroupNorm:
    return nn.GroupNorm(groups, channels, eps=1e-6)


class ResnetBlock(nn.Module):
    def __init__(self, in_channels: int, out_channels: int, groups: int) -> None:
        super().__init__()
        self.norm1, self.conv1 = group_norm(in_channels, groups), nn.Conv2d(in_channels, out_channels, 3, padding=1)
        self.norm2, self.conv2 = group_norm(out_channels, groups), nn.Conv2d(out_channels, out_channels, 3, padding=1)
        same = in_channels == out_channels
        self.nin_shortcut = nn.Identity() if same else nn.Conv2d(in_channels, out_channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = self.conv1(F.silu(self.norm1(x)))
        out: Tensor = self.nin_shortcut(x) + self.conv2(F.silu(self.norm2(h)))
        return out


class AttnBlock(nn.Module):
    """Self-attention among all positions, with one head."""

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
    """Residual blocks at one resolution, each with optional attention, then the change to the next resolution."""

    def __init__(self, in_channels: int, out_channels: int, blocks: int, groups: int, *, attention: bool) -> None:
        super().__init__()
        self.res = nn.ModuleList(
            ResnetBlock(in_channels if i == 0 else out_channels, out_channels, groups) for i in range(blocks)
        )
        self.attn = nn.ModuleList(AttnBlock(out_channels, groups) for _ in range(blocks if attention else 0))
        self.downsample: nn.Module = nn.Identity()
        self.upsample: nn.Module = nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        for i, block in enumerate(self.res):
            x = block(x)
            if len(self.attn):
                x = self.attn[i](x)
        out: Tensor = self.upsample(self.downsample(x))
        return out


def build_mid_blocks(channels: int, groups: int) -> nn.ModuleList:
    first, last = (ResnetBlock(channels, channels, groups) for _ in range(2))
    return nn.ModuleList([first, AttnBlock(channels, groups), last])


class VQEncoder(nn.Module):
    def __init__(self, config: VQConfig) -> None:
        super().__init__()
        widths, groups = [config.channels * factor for factor in config.channel_multipliers], config.norm_num_groups
        self.conv_in = nn.Conv2d(3, config.channels, 3, padding=1)
        self.conv_blocks = nn.ModuleList()
        for i, width in enumerate(widths):
            last = i == len(widths) - 1
            in_channels = widths[i - 1] if i else config.channels
            level = VQLevel(in_channels, width, config.num_res_blocks, groups, attention=last)
            level.downsample = nn.Identity() if last else Downsample(width)
            self.conv_blocks.append(level)
        self.mid = build_mid_blocks(widths[-1], groups)
        self.norm_out = group_norm(widths[-1], groups)
        self.conv_out = nn.Conv2d(widths[-1], config.z_channels, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv_in(x)
        for block in (*self.conv_blocks, *self.mid):
            x = block(x)
        out: Tensor = self.conv_out(F.silu(self.norm_out(x)))
        return out


class VQDecoder(nn.Module):
    def __init__(self, config: VQConfig) -> None:
        super().__init__()
        widths = [config.channels * factor for factor in reversed(config.channel_multipliers)]
        blocks, groups = config.num_res_blocks + 1, config.norm_num_groups
        self.conv_in = nn.Conv2d(config.z_channels, widths[0], 3, padding=1)
        self.mid = build_mid_blocks(widths[0], groups)
        self.conv_blocks = nn.ModuleList()
        for i, width in enumerate(widths):
            level = VQLevel(widths[max(i - 1, 0)], width, blocks, groups, attention=i == 0)
            level.upsample = nn.Identity() if i == len(widths) - 1 else Upsample(width)
            self.conv_blocks.append(level)
        self.norm_out, self.conv_out = group_norm(widths[-1], groups), nn.Conv2d(widths[-1], 3, 3, padding=1)

    def forward(self, z: Tensor) -> Tensor:
        x = self.conv_in(z)
        for block in (*self.mid, *self.conv_blocks):
            x = block(x)
        out: Tensor = self.conv_out(F.silu(self.norm_out(x)))
        return out


class VQ(AutoencoderNet):
    """Pixels in [0, 1] to tokens and back; the network itself works in [-1, 1]."""

    def __init__(self, config: VQConfig) -> None:
        super().__init__()
        self.config, self.codebook_size, self.stride = config, config.codebook_size, config.stride
        lfq = config.quantizer == "lfq"
        dim = int(math.log2(config.codebook_size)) if lfq else config.codebook_dim
        self.encoder, self.decoder = VQEncoder(config), VQDecoder(config)
        self.quantize: VectorQuantizer | LookupFreeQuantizer = (
            LookupFreeQuantizer(config.codebook_size) if lfq else VectorQuantizer(config.codebook_size, dim)
        )
        self.quant_conv = nn.Conv2d(config.z_channels, dim, 1)
        self.post_quant_conv = nn.Conv2d(dim, config.z_channels, 1)

    def encode_continuous(self, pixels: Tensor) -> Tensor:
        """Latents before quantization: [N, C, h, w] of [N, 3, H, W]."""
        out: Tensor = self.quant_conv(self.encoder(2 * pixels - 1))
        return out

    def token_embeddings(self, ids: Tensor) -> Tensor:
        """Codebook vectors [N, h * w, C] of tokens [N, h * w]."""
        return self.quantize.lookup(ids)

    def encode(self, pixels: Tensor) -> Tensor:
        """Tokens [N, h * w], row by row."""
        return self.quantize.assign_codes(self.encode_continuous(pixels))

    def decode(self, z: Tensor) -> Tensor:
        """Pixels [N, 3, H, W] of the tokens [N, h * w] of square images, decoded in chunks to bound memory."""
        side = math.isqrt(z.shape[1])
        chunks = split_batch(z.reshape(len(z), side, side), self.stride)
        return torch.cat([self._decode(chunk) for chunk in chunks])

    def _decode(self, ids: Tensor) -> Tensor:
        return self.decode_unclamped(self.quantize.lookup(ids).permute(0, 3, 1, 2)).clamp(0, 1)

    def decode_unclamped(self, latents: Tensor) -> Tensor:
        """The network's output, which may exceed [0, 1] a little."""
        pixels: Tensor = self.decoder(self.post_quant_conv(latents)).float()
        return (pixels + 1) / 2

    def forward(self, pixels: Tensor) -> tuple[Tensor, Tensor]:
        """The reconstruction, with a straight-through gradient, and the weighted losses of the quantizer."""
        output, config = self.quantize(self.encode_continuous(pixels)), self.config
        loss = output.codebook_loss + config.commitment_weight * output.commitment_loss
        loss = loss + config.entropy_weight * output.entropy_loss
        return self.decode_unclamped(output.latent), loss + config.dead_code_weight * output.dead_code_loss

    def loss_metrics(self, loss: Tensor) -> dict[str, Tensor]:
        """The weighted sum of the quantizer's losses: codebook, commitment, entropy and dead codes."""
        return {"vq_loss": loss.detach()}

    def last_layer(self) -> nn.Conv2d:
        return self.decoder.conv_out

    @torch.no_grad()
    def codebook_usage(self, pixels: Tensor) -> float:
        counts = torch.bincount(self.encode(pixels).flatten(), minlength=self.codebook_size)
        return (counts > 0).float().mean().item()


def drop_usage_buffer(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Published weights without their ring buffer of used codes."""
    return {key: value for key, value in tensors.items() if key != "quantize.codebook_used"}


class ColorTokenizer(nn.Module):
    """A tokenizer without weights: the color of each cell, rounded to a lattice of colors.

    It stands in where no tokenizer is configured. Codes beyond the largest cube below `codebook_size` are never used.
    """

    def __init__(self, codebook_size: int, grid_size: int, image_size: int) -> None:
        super().__init__()
        self.levels = max(level for level in range(2, 65) if level**3 <= codebook_size)
        self.grid_size, self.image_size = grid_size, image_size

    def encode_continuous(self, pixels: Tensor) -> Tensor:
        """The color of each cell in [-1, 1]: [N, 3, grid, grid] of [N, 3, H, W] in [0, 1]."""
        return 2 * F.adaptive_avg_pool2d(pixels.float(), self.grid_size) - 1

    def token_embeddings(self, ids: Tensor) -> Tensor:
        """Colors [N, grid * grid, 3] in [-1, 1] of tokens [N, grid * grid]."""
        return 2 * self._colors(ids) - 1

    def encode(self, pixels: Tensor) -> Tensor:
        """Tokens [N, grid * grid] of [N, 3, H, W] in [0, 1]."""
        cells = F.adaptive_avg_pool2d(pixels.float(), self.grid_size).flatten(2)  # [N, 3, grid * grid]
        steps = (cells * (self.levels - 1)).round().long()
        return (steps[:, 0] * self.levels + steps[:, 1]) * self.levels + steps[:, 2]

    def decode(self, ids: Tensor) -> Tensor:
        """Pixels [N, 3, H, W] of square images."""
        side = math.isqrt(ids.shape[1])
        cells = self._colors(ids).transpose(1, 2).reshape(len(ids), 3, side, side)
        return F.interpolate(cells, (self.image_size, self.image_size))

    def _colors(self, ids: Tensor) -> Tensor:
        ids = ids % self.levels**3
        channels = (ids // self.levels**2, ids // self.levels % self.levels, ids % self.levels)
        return torch.stack(channels, 2).float() / (self.levels - 1)
