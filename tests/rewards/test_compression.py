"""The proxy orders pictures as the real JPEG does."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from tastemaker.rewards.compression import CompressionReward, JpegReward


def pictures(count: int, height: int, width: int) -> Tensor:
    """Smooth to rough, faint to strong, in colour, some with hard edges."""
    rng = torch.Generator().manual_seed(0)
    made = []
    for i in range(count):
        window = 1 + int(torch.randint(12, (), generator=rng))
        noise = functional.avg_pool2d(torch.randn(1, 3, height + 12, width + 12, generator=rng), window, 1)
        noise = noise[:, :, :height, :width]
        contrast = 0.3 * torch.rand((), generator=rng)
        picture = noise / noise.std() * contrast + torch.rand(1, 3, 1, 1, generator=rng)
        made.append(picture.gt(0.5).float() if i % 5 == 0 else picture.clamp(0, 1))
    return torch.stack(made)


def ranks(x: Tensor) -> Tensor:
    return x.argsort().argsort().double()


@pytest.mark.parametrize(("height", "width"), [(64, 64), (50, 70)])
@pytest.mark.parametrize("quality", [95, 50])
def test_the_proxy_ranks_pictures_like_the_size_of_their_jpeg(height: int, width: int, quality: int) -> None:
    pixels, blank = pictures(60, height, width), [""] * 60
    real = JpegReward(quality=quality).score(pixels, blank, [{}] * 60)
    proxy = CompressionReward(quality=quality).score(pixels, blank, [{}] * 60)
    assert torch.corrcoef(torch.stack([ranks(real), ranks(proxy)]))[0, 1] > 0.9


def test_a_flat_picture_costs_nothing_whatever_its_color() -> None:
    pixels = torch.rand(4, 1, 3, 1, 1, generator=torch.Generator().manual_seed(1)).expand(4, 1, 3, 16, 16)
    torch.testing.assert_close(CompressionReward().score(pixels, [""] * 4, [{}] * 4), torch.zeros(4), atol=1e-6, rtol=0)


def test_one_cosine_costs_what_the_formula_says() -> None:
    # A luma wave of one coefficient c at quality 50, where the step of (0, 1) is 11: 2 log2(1 + (c / 11)^2) bits.
    places = torch.arange(8)
    wave = torch.cos((2 * places + 1) * torch.pi / 16)[None, :].expand(8, 8)
    amplitude = 0.2
    pixels = (0.5 + amplitude * wave).expand(1, 1, 3, 8, 8)
    coefficient = 255 * amplitude * 4 * 2**0.5  # orthonormal: sum of cos^2 over 8 is 4, over rows 8; sqrt(8) * 2
    bits = 2 * torch.log2(torch.tensor(1 + (coefficient / 11) ** 2))
    torch.testing.assert_close(CompressionReward(quality=50).score(pixels, [""], [{}])[0], -bits / 8000)


def test_ascent_on_the_proxy_shrinks_the_real_jpeg() -> None:
    pixels = pictures(4, 32, 32)
    before = JpegReward().score(pixels, [""] * 4, [{}] * 4)
    for _ in range(20):
        pixels.requires_grad_()
        score = CompressionReward().score(pixels, [""] * 4, [{}] * 4).sum()
        pixels = (pixels + 0.01 * torch.autograd.grad(score, pixels)[0].sign()).detach().clamp(0, 1)
    assert bool((JpegReward().score(pixels, [""] * 4, [{}] * 4) > before).all())
