"""Decoding in tiles: equal to the whole where the decoder is local, with its gradient and less memory."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tastemaker.core.types import Placement
from tastemaker.models.decoder_tiles import decode_in_tiles, tile_starts
from tastemaker.models.ltx import LtxSpec


def upsample(latents: Tensor) -> Tensor:
    """A decoder without a receptive field: every latent becomes 8x8 pixels of three channels."""
    return F.interpolate(latents.flatten(0, 1)[:, :3], scale_factor=8).unflatten(0, latents.shape[:2])[:, :3]


@pytest.mark.parametrize(("height", "width"), [(8, 8), (9, 21), (30, 13)])
def test_tiles_of_a_local_decoder_equal_the_whole_with_gradients(height: int, width: int) -> None:
    latents = torch.randn(2, 3, 4, height, width, generator=torch.Generator().manual_seed(0), requires_grad=True)
    tiled, whole = decode_in_tiles(upsample, latents, 8), upsample(latents)
    torch.testing.assert_close(tiled, whole)
    (expected,) = torch.autograd.grad(whole.square().sum(), latents)
    torch.testing.assert_close(torch.autograd.grad(tiled.square().sum(), latents)[0], expected, rtol=1e-5, atol=1e-5)


def test_tiles_cover_a_side_and_overlap() -> None:
    assert tile_starts(20, 8) == [0, 6, 12] and tile_starts(21, 8) == [0, 6, 12, 13] and tile_starts(8, 8) == [0]


def test_only_one_tile_is_decoded_at_a_time() -> None:
    sizes = []
    decode_in_tiles(lambda x: sizes.append(tuple(x.shape[-2:])) or upsample(x), torch.zeros(1, 3, 1, 20, 8), 8)
    assert sizes == [(8, 8)] * 3


def test_tile_size_of_a_model_is_in_pixels() -> None:
    spec = replace(LtxSpec().tiny(), height=128, width=128)  # 4x4 latents
    whole, tiled = (replace(spec, decode_tile_size=size).load(Placement()) for size in (None, 64))
    tiled.autoencoder.net.load_state_dict(whole.autoencoder.net.state_dict())
    latents = torch.randn(1, *spec.shape, generator=torch.Generator().manual_seed(0), requires_grad=True)
    a, b = whole.decode(latents, [0]), tiled.decode(latents, [0])
    assert tiled.autoencoder.tile == 2 and a.shape == b.shape and not torch.equal(a, b)
    b.sum().backward()
    assert latents.grad is not None and latents.grad.abs().sum() > 0
