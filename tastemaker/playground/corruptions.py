"""Image corruptions: artifacts of generators and of unfinished samples, with one strength per image."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ..core.randomness import Randomness
from .purposes import PlaygroundPurpose
from .scenes import SIDE

BLOCK = 8  # pixels per side


def add_noise(pixels: Tensor, strength: Tensor, rng: Randomness) -> Tensor:
    """Add normal noise with one standard deviation per image."""
    return pixels + strength.view(-1, 1, 1, 1) * rng.normal(PlaygroundPurpose.PIXEL_NOISE, *pixels.shape[1:])


def blur(pixels: Tensor, strength: Tensor) -> Tensor:
    """Blend with blurred copies; a strength of 1 leaves hardly any shapes."""
    near = _mean(_mean(pixels, 5), 5)
    far = _mean(_mean(near, 11), 11)
    share = strength.view(-1, 1, 1, 1)
    return torch.where(share < 0.5, torch.lerp(pixels, near, 2 * share), torch.lerp(near, far, 2 * share - 1))


def _mean(pixels: Tensor, window: int) -> Tensor:
    half = window // 2
    return F.avg_pool2d(F.pad(pixels, (half, half, half, half), mode="replicate"), window, 1)


def mask_blocks(pixels: Tensor, share: Tensor, rng: Randomness) -> Tensor:
    """Fill a fraction of the 8x8 blocks with the image's mean color, as previews of masked models show them."""
    side = SIDE // BLOCK
    hidden = rng.uniform(PlaygroundPurpose.MASKED_BLOCKS, 1, side, side) < share.view(-1, 1, 1, 1)
    return torch.where(F.interpolate(hidden.float(), scale_factor=float(BLOCK)) > 0, pixels.mean((2, 3), True), pixels)


def oversharpen(pixels: Tensor, strength: Tensor) -> Tensor:
    """Exaggerate edges, an artifact of reward gradients."""
    return pixels + 2 * strength.view(-1, 1, 1, 1) * (pixels - _mean(pixels, 3))


def blend_neighbor(pixels: Tensor, strength: Tensor) -> Tensor:
    """Blend with the next image of the batch."""
    return torch.lerp(pixels, pixels.roll(1, 0), 0.5 * strength.view(-1, 1, 1, 1))


def augment(pixels: Tensor, rng: Randomness) -> Tensor:
    """Augment images with blur, noise up to 0.12 and brightness; a third of them stay as they are."""
    draws = rng.uniform(PlaygroundPurpose.AUGMENTATION, 4)
    some = (draws[:, 3] > 1 / 3).float()
    bright = (1 + 0.3 * some * (draws[:, 2] - 0.5)).view(-1, 1, 1, 1)
    return (add_noise(blur(pixels * bright, 0.25 * some * draws[:, 0]), 0.12 * some * draws[:, 1], rng)).clamp(0, 1)


def simulate_preview(pixels: Tensor, t: Tensor, rng: Randomness) -> Tensor:
    """Simulate a preview at noise level t: blurry and noisy, or with masked blocks."""
    kind = rng.uniform(PlaygroundPurpose.PREVIEW_KIND, 1)[:, 0]
    soft = blur(pixels, torch.where(kind < 0.6, t, 0.0))
    dim = torch.lerp(soft, soft.mean((2, 3), True), torch.where(kind < 0.6, 0.5 * t, 0.0).view(-1, 1, 1, 1))
    grainy = add_noise(dim, torch.where(kind < 0.8, 0.2 * t, 0.0), rng)
    return mask_blocks(grainy, torch.where(kind > 0.6, t, 0.0), rng).clamp(0, 1)


def corrupt(pixels: Tensor, kind: Tensor, strength: Tensor, rng: Randomness) -> Tensor:
    """Apply one of five corruptions per image, with a strength from 0 to 1."""
    by_kind = [
        add_noise(pixels, 0.25 * strength, rng),
        blur(pixels, 0.8 * strength),
        oversharpen(pixels, strength),
        blend_neighbor(pixels, strength),
        mask_blocks(pixels, 0.4 * strength, rng),
    ]
    flawed = by_kind[0]
    for place, other in enumerate(by_kind[1:], 1):
        flawed = torch.where((kind == place).view(-1, 1, 1, 1), other, flawed)
    return flawed.clamp(0, 1)
