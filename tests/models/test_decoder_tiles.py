"""Decoding in tiles: equal to the whole where the decoder is local, with its gradient and less memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tastemaker.core.types import Placement
from tastemaker.diagnostics.fake_memory import trace_peak_bytes
from tastemaker.models.decoder_tiles import decode_in_tiles, decode_in_time_tiles, tile_starts
from tastemaker.models.ltx import LTX, LtxSpec


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


def repeat_frames(latents: Tensor, frames: Sequence[int]) -> Tensor:
    """A decoder without a receptive field: the first latent becomes one frame, each other four, of three channels."""
    return latents[:, :3, [-(-frame // 4) for frame in frames]]


@pytest.mark.parametrize("frames", [range(41), (40, 3, 17), (0,)])
def test_time_tiles_of_a_local_decoder_equal_the_whole_with_gradients(frames: Sequence[int]) -> None:
    latents = torch.randn(2, 3, 11, 2, 2, generator=torch.Generator().manual_seed(0), requires_grad=True)
    whole, tiled = repeat_frames(latents, frames), decode_in_time_tiles(repeat_frames, latents, frames, 4, 4)
    torch.testing.assert_close(tiled, whole)
    (expected,) = torch.autograd.grad(whole.square().sum(), latents)
    torch.testing.assert_close(torch.autograd.grad(tiled.square().sum(), latents)[0], expected, rtol=1e-5, atol=1e-5)


def test_only_time_tiles_with_a_needed_frame_are_decoded() -> None:
    calls: list[tuple[int, Sequence[int]]] = []

    def decode(part: Tensor, frames: Sequence[int]) -> Tensor:
        calls.append((int(part[0, 0, 0, 0, 0]), tuple(frames)))
        return repeat_frames(part, frames)

    latents = torch.arange(11.0).view(1, 1, -1, 1, 1).expand(1, 3, -1, 1, 1)
    decode_in_time_tiles(decode, latents, [40, 30], 4, 4)  # tiles begin at latents 0, 2, 4, 6 and 7
    assert calls == [(6, (6,)), (7, (12, 2))]
    with pytest.raises(KeyError):
        decode_in_time_tiles(decode, latents, [41], 4, 4)


@pytest.mark.slow
@pytest.mark.parametrize("frames", [[40], pytest.param(None, marks=pytest.mark.long)])
def test_time_tiles_of_a_model_need_less_memory_for_the_gradient(
    frames: list[int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    wide: Any = {**LTX.tiny_configs["vae"], "decoder_block_out_channels": (64,) * 4}
    monkeypatch.setitem(cast(Any, LTX.tiny_configs), "vae", wide)
    spec, peaks = replace(LtxSpec().tiny(), frames=97, height=64, width=64), {}  # 13 latents
    for tile_frames in (None, 17):
        model = replace(spec, decode_tile_frames=tile_frames).load(Placement())
        latents = torch.randn(1, *spec.shape, generator=torch.Generator().manual_seed(0), requires_grad=True)
        peaks[tile_frames] = trace_peak_bytes(partial(backward, model, latents, frames), [])
        assert latents.grad is not None and bool(latents.grad.any())
    assert peaks[17] < 0.4 * peaks[None]


def backward(model: Any, latents: Tensor, frames: list[int] | None) -> None:
    model.decode(latents, frames).sum().backward()
