"""The convolutional autoencoder, and the pixel-shuffle autoencoder that replaces it."""

from __future__ import annotations

import pytest
import torch

from tastemaker.core.registry import ConfigError
from tastemaker.core.types import Placement
from tastemaker.models.nets.vae import ConvAutoencoder, PixelShuffleAutoencoder, clamp_keep_gradient
from tastemaker.models.pretrained_autoencoder import load_vae
from tastemaker.models.vae import VaeSpec


@pytest.mark.parametrize("kl_weight", [0.0, 1e-6])
@pytest.mark.parametrize(("factor", "side"), [(8, 2), (4, 4)])
def test_latent_and_pixel_shapes(factor: int, side: int, kl_weight: float) -> None:
    net = VaeSpec(latent_channels=4, width=8, downsample_factor=factor, kl_weight=kl_weight).load(Placement())  # type: ignore[arg-type]
    pixels = torch.rand(3, 3, 16, 16)
    z = net.encode(pixels)
    assert z.shape == (3, 4, side, side)
    assert net.decode(z).shape == pixels.shape
    reconstruction, extra_loss = net(pixels)
    assert reconstruction.shape == pixels.shape and extra_loss.shape == (3,) and bool((extra_loss > 0).all())


def test_measured_latents_are_standardized() -> None:
    net, pixels = VaeSpec(latent_channels=4, width=8).load(Placement()), torch.rand(64, 3, 32, 32)
    net.measure_latents(pixels)
    z = net.encode(pixels)
    assert torch.allclose(z.mean((0, 2, 3)), torch.zeros(4), atol=1e-4)
    assert torch.allclose(z.std((0, 2, 3)), torch.ones(4), atol=1e-4)


def test_measuring_latents_keeps_reconstructions() -> None:
    net, pixels = VaeSpec(latent_channels=4, width=8).load(Placement()), torch.rand(8, 3, 16, 16)
    before = net.decode(net.encode(pixels))
    net.measure_latents(pixels)
    assert torch.allclose(net.decode(net.encode(pixels)), before, atol=1e-4)


def test_latent_noise_is_added_in_training_only() -> None:
    net, pixels = VaeSpec(latent_channels=4, width=8, latent_noise=0.5).load(Placement()), torch.rand(2, 3, 16, 16)
    assert not net(pixels)[0].equal(net(pixels)[0])
    net.eval()
    assert net(pixels)[0].equal(net(pixels)[0])


def test_clamp_keeps_gradient() -> None:
    raw = torch.tensor([-1.0, 0.5, 2.0], requires_grad=True)
    clamped = clamp_keep_gradient(raw)
    assert clamped.tolist() == [0.0, 0.5, 1.0]
    (clamped * torch.tensor([1.0, 2.0, 3.0])).sum().backward()
    assert raw.grad is not None and raw.grad.tolist() == [1.0, 2.0, 3.0]


def test_pixel_shuffle_autoencoder_round_trip() -> None:
    autoencoder = PixelShuffleAutoencoder(16, 8)
    pixels = torch.rand(2, 3, 4, 4).repeat_interleave(4, -1).repeat_interleave(4, -2)
    z = autoencoder.encode(pixels)
    assert z.shape == (2, 16, 2, 2)
    assert torch.allclose(autoencoder.decode(z), pixels, atol=1e-6)
    assert isinstance(load_vae(None, 16, 8, Placement()), PixelShuffleAutoencoder)
    with pytest.raises(ValueError, match=r"'latent_channels'.*4.*TM485"):
        PixelShuffleAutoencoder(4, 8)


def test_missing_autoencoder_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"'playground/nothing'.*TM546"):
        load_vae("playground/nothing", 16, 8, Placement())


def test_tiny_vae_has_the_same_latent_shape() -> None:
    net = VaeSpec().tiny().load(Placement())
    assert isinstance(net, ConvAutoencoder)
    assert sum(p.numel() for p in net.parameters()) < 100_000
    assert net.encode(torch.rand(1, 3, 64, 64)).shape == (1, 16, 8, 8)
