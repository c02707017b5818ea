"""The differentiable compression proxy ranks images as the size of their JPEG does."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from tastemaker.rewards.compression import CompressionReward, JpegReward


def random_images(count: int, height: int, width: int) -> Tensor:
    """Color images from smooth to rough and from low to high contrast, some with hard edges."""
    rng = torch.Generator().manual_seed(0)
    images = []
    for i in range(count):
        window = 1 + int(torch.randint(12, (), generator=rng))
        noise = functional.avg_pool2d(torch.randn(1, 3, height + 12, width + 12, generator=rng), window, 1)
        noise = noise[:, :, :height, :width]
        contrast = 0.3 * torch.rand((), generator=rng)
        image = noise / noise.std() * contrast + torch.rand(1, 3, 1, 1, generator=rng)
        images.append(image.gt(0.5).float() if i % 5 == 0 else image.clamp(0, 1))
    return torch.stack(images)


def ranks(x: Tensor) -> Tensor:
    return x.argsort().argsort().double()


@pytest.mark.parametrize(("height", "width"), [(64, 64), (50, 70)])
@pytest.mark.parametrize("quality", [95, 50])
def test_proxy_ranks_images_by_jpeg_size(height: int, width: int, quality: int) -> None:
    pixels, blank = random_images(60, height, width), [""] * 60
    real = JpegReward(quality=quality).score(pixels, blank, [{}] * 60)
    proxy = CompressionReward(quality=quality).score(pixels, blank, [{}] * 60)
    assert torch.corrcoef(torch.stack([ranks(real), ranks(proxy)]))[0, 1] > 0.9


def test_flat_image_of_any_color_has_zero_bits() -> None:
    pixels = torch.rand(4, 1, 3, 1, 1, generator=torch.Generator().manual_seed(1)).expand(4, 1, 3, 16, 16)
    torch.testing.assert_close(CompressionReward().score(pixels, [""] * 4, [{}] * 4), torch.zeros(4), atol=1e-6, rtol=0)


def test_single_dct_coefficient_costs_closed_form_bits() -> None:
    # A luma wave of one coefficient c at quality 50, where the step of (0, 1) is 11: 2 log2(1 + (c / 11)^2) bits.
    positions = torch.arange(8)
    wave = torch.cos((2 * positions + 1) * torch.pi / 16)[None, :].expand(8, 8)
    amplitude = 0.2
    pixels = (0.5 + amplitude * wave).expand(1, 1, 3, 8, 8)
    coefficient = 255 * amplitude * 4 * 2**0.5  # orthonormal: sum of cos^2 over 8 is 4, over rows 8; sqrt(8) * 2
    bits = 2 * torch.log2(torch.tensor(1 + (coefficient / 11) ** 2))
    torch.testing.assert_close(CompressionReward(quality=50).score(pixels, [""], [{}])[0], -bits / 8000)


def test_gradient_ascent_on_proxy_shrinks_the_jpeg() -> None:
    pixels = random_images(4, 32, 32)
    before = JpegReward().score(pixels, [""] * 4, [{}] * 4)
    for _ in range(20):
        pixels.requires_grad_()
        score = CompressionReward().score(pixels, [""] * 4, [{}] * 4).sum()
        pixels = (pixels + 0.01 * torch.autograd.grad(score, pixels)[0].sign()).detach().clamp(0, 1)
    assert bool((JpegReward().score(pixels, [""] * 4, [{}] * 4) > before).all())
