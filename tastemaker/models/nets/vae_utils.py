"""What variational autoencoders share: grey pictures, beliefs about latents, and sides that fit."""

from __future__ import annotations

import torch
from torch import Tensor

from ...core.registry import ConfigError

BATCH_PIXELS = 2**20  # pixels that are encoded or decoded together: 16 pictures of 256 a side
LUMA_WEIGHTS = (0.299, 0.587, 0.114)  # how bright red, green and blue are (BT.601, as Pillow has it)


def to_network_range(pixels: Tensor, channels: int) -> Tensor:
    """Pictures [N, 3, H, W] in [-1, 1], for a network of so many channels; of one, how light they are."""
    if channels == 1:
        weights = torch.tensor(LUMA_WEIGHTS, device=pixels.device, dtype=pixels.dtype).view(1, 3, 1, 1)
        pixels = (pixels * weights).sum(1, keepdim=True)
    return 2 * pixels - 1


def to_pixels(made: Tensor) -> Tensor:
    """What a network made, as pictures [N, 3, H, W] about [0, 1]; grey ones in three channels alike."""
    return (made.float() / 2 + 0.5).repeat(1, 3 // made.shape[1], 1, 1)


def sample_posterior(moments: Tensor, chance: Tensor) -> tuple[Tensor, Tensor]:
    """Latents from what is believed of them, [N, 2C, h, w]; and the KL divergence of each picture's to chance: [N]."""
    mean, log_variance = moments.float().chunk(2, 1)
    log_variance = log_variance.clamp(-30, 20)  # beyond which there is nothing to learn, only to overflow
    price = (mean**2 + log_variance.exp() - 1 - log_variance).flatten(1).sum(1) / 2
    return mean + (log_variance / 2).exp() * chance, price


def split_batch(rows: Tensor, stride: int = 1) -> tuple[Tensor, ...]:
    """Few rows at a time, for what lies between pixels and latents takes many times their size."""
    return torch.split(rows, max(1, BATCH_PIXELS // (rows.shape[-2] * rows.shape[-1] * stride**2)))


def check_divisible(pixels: Tensor, stride: int) -> Tensor:
    """The same pictures, if their sides are multiples of what one latent stands for."""
    height, width = pixels.shape[-2:]
    if height % stride or width % stride:
        raise ConfigError(
            f"the autoencoder was given pictures of {height}x{width} pixels, of which one latent covers "
            f"{stride}x{stride}; set data.size to a multiple of {stride}"
        )
    return pixels
