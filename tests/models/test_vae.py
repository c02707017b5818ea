"""The small autoencoder, and what stands in for it."""

from __future__ import annotations

import pytest
import torch

from tastemaker.core.registry import ConfigError
from tastemaker.core.types import Placement
from tastemaker.models.nets.vae import Autoencoder, PixelShuffleAutoencoder, clamp_keep_gradient
from tastemaker.models.vae import Vae, load_vae


@pytest.mark.parametrize("kl", [0.0, 1e-6])
@pytest.mark.parametrize(("factor", "side"), [(8, 2), (4, 4)])
def test_latents_are_so_many_times_smaller_and_pixels_come_back(factor: int, side: int, kl: float) -> None:
    net = Vae(channels=4, width=8, factor=factor, kl=kl).load(Placement())  # type: ignore[arg-type]
    pixels = torch.rand(3, 3, 16, 16)
    z = net.encode(pixels)
    assert z.shape == (3, 4, side, side)
    assert net.decode(z).shape == pixels.shape
    made, extra = net(pixels)
    assert made.shape == pixels.shape and extra.shape == (3,) and bool((extra > 0).all())


def test_settled_latents_have_mean_zero_and_deviation_one_in_every_channel() -> None:
    net, pixels = Vae(channels=4, width=8).load(Placement()), torch.rand(64, 3, 32, 32)
    net.settle(pixels)
    z = net.encode(pixels)
    assert torch.allclose(z.mean((0, 2, 3)), torch.zeros(4), atol=1e-4)
    assert torch.allclose(z.std((0, 2, 3)), torch.ones(4), atol=1e-4)


def test_decoding_is_the_same_before_and_after_settling() -> None:
    net, pixels = Vae(channels=4, width=8).load(Placement()), torch.rand(8, 3, 16, 16)
    before = net.decode(net.encode(pixels))
    net.settle(pixels)
    assert torch.allclose(net.decode(net.encode(pixels)), before, atol=1e-4)


def test_noise_on_latents_is_for_training_only() -> None:
    net, pixels = Vae(channels=4, width=8, noise=0.5).load(Placement()), torch.rand(2, 3, 16, 16)
    assert not net(pixels)[0].equal(net(pixels)[0])
    net.eval()
    assert net(pixels)[0].equal(net(pixels)[0])


def test_pixels_are_bounded_and_their_gradient_is_not() -> None:
    raw = torch.tensor([-1.0, 0.5, 2.0], requires_grad=True)
    shown = clamp_keep_gradient(raw)
    assert shown.tolist() == [0.0, 0.5, 1.0]
    (shown * torch.tensor([1.0, 2.0, 3.0])).sum().backward()
    assert raw.grad is not None and raw.grad.tolist() == [1.0, 2.0, 3.0]


def test_coarse_pixels_come_back_as_they_were() -> None:
    folding = PixelShuffleAutoencoder(16, 8)
    coarse = torch.rand(2, 3, 4, 4).repeat_interleave(4, -1).repeat_interleave(4, -2)
    z = folding.encode(coarse)
    assert z.shape == (2, 16, 2, 2)
    assert torch.allclose(folding.decode(z), coarse, atol=1e-6)
    assert isinstance(load_vae(None, 16, 8, Placement()), PixelShuffleAutoencoder)
    with pytest.raises(ValueError, match="expected at least 12 without a codec"):
        PixelShuffleAutoencoder(4, 8)


def test_an_absent_codec_is_a_sentence() -> None:
    with pytest.raises(ConfigError, match="there are no weights 'playground/nothing'"):
        load_vae("playground/nothing", 16, 8, Placement())


def test_tiny_is_small_and_of_the_same_shape() -> None:
    net = Vae().tiny().load(Placement())
    assert isinstance(net, Autoencoder)
    assert sum(p.numel() for p in net.parameters()) < 100_000
    assert net.encode(torch.rand(1, 3, 64, 64)).shape == (1, 16, 8, 8)
