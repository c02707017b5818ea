"""Autoencoders with continuous latents: the base of variational ones, a small one, and one without weights."""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...core.autoencoder import AutoencoderNet
from ...core.registry import ConfigError

BATCH_PIXELS = 2**20  # pixels encoded or decoded at once: 16 images of 256 pixels per side
LATENT_NORM_WEIGHT = 1e-4  # of the squared latents of ConvAutoencoder, so that their scale does not drift
LUMA_WEIGHTS = (0.299, 0.587, 0.114)  # brightness of red, green and blue (BT.601, as in Pillow)


def clamp_keep_gradient(pixels: Tensor) -> Tensor:
    """Clamp to [0, 1] with the gradient of the identity, also outside of the range."""
    return pixels + (pixels.clamp(0, 1) - pixels).detach()


def to_network_range(pixels: Tensor, channels: int) -> Tensor:
    """Images [N, 3, H, W] in [0, 1] as the network's input in [-1, 1]: in color, or as luma if it has one channel."""
    if channels == 1:
        weights = torch.tensor(LUMA_WEIGHTS, device=pixels.device, dtype=pixels.dtype).view(1, 3, 1, 1)
        pixels = (pixels * weights).sum(1, keepdim=True)
    return 2 * pixels - 1


def to_pixels(output: Tensor) -> Tensor:
    """The network's output in [-1, 1] as images [N, 3, H, W] in [0, 1]; a gray channel is repeated three times."""
    return (output.float() / 2 + 0.5).repeat(1, 3 // output.shape[1], 1, 1)


def sample_posterior(moments: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
    """Latents [N, C, h, w] from means and log-variances [N, 2 C, h, w], and the KL divergence to N(0, 1) per image."""
    mean, log_variance = moments.float().chunk(2, 1)
    log_variance = log_variance.clamp(-30, 20)  # outside of which the exponential would overflow
    kl = (mean**2 + log_variance.exp() - 1 - log_variance).flatten(1).sum(1) / 2
    return mean + (log_variance / 2).exp() * noise, kl


def split_batch(x: Tensor, stride: int = 1) -> tuple[Tensor, ...]:
    """Chunks of a batch [N, ..., h, w] at `stride` pixels per element, because activations take far more memory."""
    return torch.split(x, max(1, BATCH_PIXELS // (x.shape[-2] * x.shape[-1] * stride**2)))


def check_divisible(pixels: Tensor, stride: int) -> Tensor:
    """The images themselves; refuse them if their sides are no multiples of the stride."""
    height, width = pixels.shape[-2:]
    if height % stride or width % stride:
        raise ConfigError(
            f"the images are {height}x{width} pixels, but one latent of the autoencoder covers {stride}x{stride}; "
            f"set data.image_size to a multiple of {stride} [TM484]"
        )
    return pixels


class VariationalAutoencoder(AutoencoderNet):
    """An autoencoder whose encoder outputs means and log-variances, with measured statistics of its latents."""

    mean: Tensor
    std: Tensor
    kl_weight: float

    def moments(self, pixels: Tensor) -> Tensor:
        """Means, then log-variances of the latents: [N, 2 C, h, w] of images [N, 3, H, W]."""
        raise NotImplementedError

    def decode_unclamped(self, latents: Tensor) -> Tensor:
        """Images of latents as the network has them; they may exceed [0, 1] a little."""
        raise NotImplementedError

    def forward(self, pixels: Tensor, noise: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The reconstruction and the weighted KL divergence per image.

        Without `noise`, it is drawn in training, and the means are decoded otherwise.
        """
        moments = self.moments(pixels)
        if noise is None:
            noise = torch.randn_like(moments[:, : self.channels]) * self.training
        latents, kl = sample_posterior(moments, noise)
        return self.decode_unclamped(latents), self.kl_weight * kl

    def latent_noise_shape(self, pixels: Tensor) -> tuple[int, ...]:
        return self.channels, pixels.shape[-2] // self.stride, pixels.shape[-1] // self.stride

    def loss_metrics(self, loss: Tensor) -> dict[str, Tensor]:
        """The KL divergence per image, without its weight."""
        return {"kl_loss": loss.detach() / self.kl_weight} if self.kl_weight else {}

    def encode(self, pixels: Tensor) -> Tensor:
        """Means of the latents, normalized by the measured statistics."""
        return (self.moments(pixels)[:, : self.channels] - self.mean) / self.std

    def decode(self, z: Tensor) -> Tensor:
        raw = z * self.std + self.mean
        return clamp_keep_gradient(torch.cat([self.decode_unclamped(part) for part in split_batch(raw, self.stride)]))


class VaeResidualBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.first_norm, self.first = nn.GroupNorm(8, width), nn.Conv2d(width, width, 3, padding=1)
        self.second_norm, self.second = nn.GroupNorm(8, width), nn.Conv2d(width, width, 3, padding=1)

    def forward(self, h: Tensor) -> Tensor:
        inner = self.first(F.silu(self.first_norm(h)))
        out: Tensor = h + self.second(F.silu(self.second_norm(inner)))
        return out


def build_encoder(widths: tuple[int, ...], out_channels: int) -> nn.Sequential:
    layers: list[nn.Module] = [nn.Conv2d(3, widths[0], 3, padding=1)]
    for narrow, wide in pairwise(widths):
        layers += [nn.Conv2d(narrow, wide, 4, 2, 1), VaeResidualBlock(wide)]
    return nn.Sequential(*layers, nn.GroupNorm(8, widths[-1]), nn.SiLU(), nn.Conv2d(widths[-1], out_channels, 1))


def build_decoder(widths: tuple[int, ...], in_channels: int, last: int) -> nn.Sequential:
    """The decoder, narrow and without residual blocks at full resolution, where activations are largest."""
    layers: list[nn.Module] = [nn.Conv2d(in_channels, widths[-1], 3, padding=1), VaeResidualBlock(widths[-1])]
    descending = widths[::-1]
    for wide, narrow in pairwise(descending[:-1]):
        layers += [nn.Conv2d(wide, narrow * 4, 1), nn.PixelShuffle(2), VaeResidualBlock(narrow)]
    layers += [nn.Conv2d(descending[-2], last * 4, 1), nn.PixelShuffle(2), nn.Conv2d(last, last, 3, padding=1)]
    return nn.Sequential(*layers, nn.SiLU(), nn.Conv2d(last, 3, 3, padding=1))


class ConvAutoencoder(AutoencoderNet):
    """Pixels to latents `factor` times smaller per side and back; variational if the KL weight is positive."""

    mean: Tensor
    std: Tensor

    def __init__(self, channels: int, width: int, factor: int, latent_noise: float, kl_weight: float) -> None:
        super().__init__()
        self.channels, self.stride, self.latent_noise, self.kl_weight = channels, factor, latent_noise, kl_weight
        widths = (width, width * 2, width * 2, width * 3)[: factor.bit_length()]
        self.encoder = build_encoder(widths, channels * (2 if kl_weight else 1))
        self.decoder = build_decoder(widths, channels, max(8, width * 4 // 5))
        self.register_buffer("mean", torch.zeros(1, channels, 1, 1))
        self.register_buffer("std", torch.ones(1, channels, 1, 1))

    def encode(self, pixels: Tensor) -> Tensor:
        """Latents of mean 0 and standard deviation 1 per channel, once `measure_latents` was called."""
        return (self._encode_raw(pixels)[:, : self.channels] - self.mean) / self.std

    def decode(self, z: Tensor) -> Tensor:
        return clamp_keep_gradient(self._decode_raw(z * self.std + self.mean))

    def forward(self, pixels: Tensor) -> tuple[Tensor, Tensor]:
        """The unclamped reconstruction from noisy latents, and the weighted loss of the latents per image."""
        z = self._encode_raw(pixels)
        noise = torch.randn_like(z[:, : self.channels]) * self.training
        if not self.kl_weight:
            # Noise makes similar latents decode to similar images, which a diffusion model in latent space needs.
            noisy = z + self.latent_noise * z.detach().std() * noise
            return self._decode_raw(noisy), LATENT_NORM_WEIGHT * z.square().flatten(1).mean(1)
        mean, log_variance = z.chunk(2, 1)
        log_variance = log_variance.clamp(-30, 20)
        kl = (mean**2 + log_variance.exp() - 1 - log_variance).flatten(1).mean(1) / 2
        return self._decode_raw(mean + (log_variance / 2).exp() * noise), self.kl_weight * kl

    def loss_metrics(self, loss: Tensor) -> dict[str, Tensor]:
        """The KL divergence per latent, or the squared latents, without their weight."""
        if self.kl_weight:
            return {"kl_loss": loss.detach() / self.kl_weight}
        return {"latent_norm": loss.detach() / LATENT_NORM_WEIGHT}

    def _encode_raw(self, pixels: Tensor) -> Tensor:
        z: Tensor = self.encoder(pixels * 2 - 1)
        return z.float()

    def _decode_raw(self, latents: Tensor) -> Tensor:
        pixels: Tensor = self.decoder(latents)
        return pixels.float() / 2 + 0.5

    def last_layer(self) -> nn.Conv2d:
        layer = self.decoder[-1]
        assert isinstance(layer, nn.Conv2d)
        return layer

    @torch.no_grad()
    def measure_latents(self, pixels: Tensor) -> None:
        z = self._encode_raw(pixels)[:, : self.channels]
        self.mean.copy_(z.mean((0, 2, 3), keepdim=True))
        self.std.copy_(z.std((0, 2, 3), keepdim=True).clamp(min=1e-6))


class PixelShuffleAutoencoder(AutoencoderNet):
    """An autoencoder without weights, whose latents are downsampled pixels; it stands in where none is configured."""

    CELLS = 2  # pixels per side in each latent

    def __init__(self, channels: int, factor: int) -> None:
        super().__init__()
        self.channels, self.stride = channels, factor
        self.padding = channels - 3 * self.CELLS**2
        if self.padding < 0:
            required = 3 * self.CELLS**2
            raise ValueError(
                f"'latent_channels': expected at least {required} without an autoencoder, got {channels}; raise "
                "'latent_channels', or set an autoencoder [TM485]"
            )

    def encode(self, pixels: Tensor) -> Tensor:
        coarse = F.avg_pool2d(pixels, self.stride // self.CELLS)
        folded = F.pixel_unshuffle(coarse, self.CELLS) * 4 - 2
        return F.pad(folded, (0, 0, 0, 0, 0, self.padding))

    def decode(self, z: Tensor) -> Tensor:
        folded = (z[:, : z.shape[1] - self.padding] + 2) / 4
        coarse = F.pixel_shuffle(folded, self.CELLS)
        return clamp_keep_gradient(F.interpolate(coarse, scale_factor=self.stride // self.CELLS))
