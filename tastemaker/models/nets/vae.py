"""A small convolutional autoencoder, and one that needs no weights."""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

INITIAL_SCALE = 1e-4  # what the size of latents costs, so that they do not drift


def clamp_keep_gradient(pixels: Tensor) -> Tensor:
    """Within [0, 1], with the gradient of what was outside."""
    return pixels + (pixels.clamp(0, 1) - pixels).detach()


class VaeResidualBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.first_norm, self.first = nn.GroupNorm(8, width), nn.Conv2d(width, width, 3, padding=1)
        self.second_norm, self.second = nn.GroupNorm(8, width), nn.Conv2d(width, width, 3, padding=1)

    def forward(self, h: Tensor) -> Tensor:
        inner = self.first(F.silu(self.first_norm(h)))
        out: Tensor = h + self.second(F.silu(self.second_norm(inner)))
        return out


def build_encoder(widths: tuple[int, ...], outputs: int) -> nn.Sequential:
    layers: list[nn.Module] = [nn.Conv2d(3, widths[0], 3, padding=1)]
    for narrow, wide in pairwise(widths):
        layers += [nn.Conv2d(narrow, wide, 4, 2, 1), VaeResidualBlock(wide)]
    return nn.Sequential(*layers, nn.GroupNorm(8, widths[-1]), nn.SiLU(), nn.Conv2d(widths[-1], outputs, 1))


def build_decoder(widths: tuple[int, ...], inputs: int, last: int) -> nn.Sequential:
    """At full size, where pixels are most, it is narrow and has no residual."""
    layers: list[nn.Module] = [nn.Conv2d(inputs, widths[-1], 3, padding=1), VaeResidualBlock(widths[-1])]
    downwards = widths[::-1]
    for wide, narrow in pairwise(downwards[:-1]):
        layers += [nn.Conv2d(wide, narrow * 4, 1), nn.PixelShuffle(2), VaeResidualBlock(narrow)]
    layers += [nn.Conv2d(downwards[-2], last * 4, 1), nn.PixelShuffle(2), nn.Conv2d(last, last, 3, padding=1)]
    return nn.Sequential(*layers, nn.SiLU(), nn.Conv2d(last, 3, 3, padding=1))


class Autoencoder(nn.Module):
    """Pixels to latents `factor` times smaller a side and back; with `kl` it is variational."""

    mean: Tensor
    std: Tensor

    def __init__(self, channels: int, width: int, factor: int, noise: float, kl: float) -> None:
        super().__init__()
        self.channels, self.stride, self.noise, self.kl = channels, factor, noise, kl
        widths = (width, width * 2, width * 2, width * 3)[: factor.bit_length()]
        self.encoder = build_encoder(widths, channels * (2 if kl else 1))
        self.decoder = build_decoder(widths, channels, max(8, width * 4 // 5))
        self.register_buffer("mean", torch.zeros(1, channels, 1, 1))
        self.register_buffer("std", torch.ones(1, channels, 1, 1))

    def encode(self, pixels: Tensor) -> Tensor:
        """Latents of mean 0 and deviation 1 in every channel, once settled."""
        return (self._latents(pixels)[:, : self.channels] - self.mean) / self.std

    def decode(self, z: Tensor) -> Tensor:
        return clamp_keep_gradient(self._pixels(z * self.std + self.mean))

    def forward(self, pixels: Tensor) -> tuple[Tensor, Tensor]:
        """The reconstruction from noisy latents, unbounded, and the price of the latents in each row."""
        z = self._latents(pixels)
        chance = torch.randn_like(z[:, : self.channels]) * self.training
        if not self.kl:
            # Noise keeps neighbouring latents alike, which is what a denoiser needs of them.
            noisy = z + self.noise * z.detach().std() * chance
            return self._pixels(noisy), INITIAL_SCALE * z.square().flatten(1).mean(1)
        mean, log_variance = z.chunk(2, 1)
        log_variance = log_variance.clamp(-30, 20)
        price = (mean**2 + log_variance.exp() - 1 - log_variance).flatten(1).mean(1) / 2
        return self._pixels(mean + (log_variance / 2).exp() * chance), self.kl * price

    def _latents(self, pixels: Tensor) -> Tensor:
        z: Tensor = self.encoder(pixels * 2 - 1)
        return z.float()

    def _pixels(self, latents: Tensor) -> Tensor:
        made: Tensor = self.decoder(latents)
        return made.float() / 2 + 0.5

    def ending(self) -> nn.Conv2d:
        """The layer that makes pixels."""
        last = self.decoder[-1]
        assert isinstance(last, nn.Conv2d)
        return last

    @torch.no_grad()
    def settle(self, pixels: Tensor) -> None:
        z = self._latents(pixels)[:, : self.channels]
        self.mean.copy_(z.mean((0, 2, 3), keepdim=True))
        self.std.copy_(z.std((0, 2, 3), keepdim=True).clamp(min=1e-6))


class PixelShuffleAutoencoder(nn.Module):
    """Coarse pixels as latents: nothing to learn, little to see; it stands in where no codec is trained yet."""

    CELLS = 2  # a side, in each latent

    def __init__(self, channels: int, factor: int) -> None:
        super().__init__()
        self.channels, self.factor, self.stride = channels, factor, factor
        self.spare = channels - 3 * self.CELLS**2
        if self.spare < 0:
            raise ValueError(f"'channels' is {channels}; expected at least {3 * self.CELLS**2} without a codec")

    def encode(self, pixels: Tensor) -> Tensor:
        coarse = F.avg_pool2d(pixels, self.factor // self.CELLS)
        folded = F.pixel_unshuffle(coarse, self.CELLS) * 4 - 2
        return F.pad(folded, (0, 0, 0, 0, 0, self.spare))

    def decode(self, z: Tensor) -> Tensor:
        folded = (z[:, : z.shape[1] - self.spare] + 2) / 4
        coarse = F.pixel_shuffle(folded, self.CELLS)
        return clamp_keep_gradient(F.interpolate(coarse, scale_factor=self.factor // self.CELLS))
