"""Decode frames in overlapping spatial tiles, so that only one tile's activations are in memory, also for gradients."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

OVERLAP = 0.25  # share of a tile's side, as in diffusers


def decode_in_tiles(decode: Callable[[Tensor], Tensor], latents: Tensor, tile: int | None) -> Tensor:
    """Decode latents [B, C, f, h, w] to pixels [B, 3, F, H, W], in tiles of `tile` latents per side; None: whole.

    Tiles are blended linearly where they overlap. In the backward pass each tile is decoded again, one at a time.
    """
    height, width = latents.shape[-2:]
    tops, lefts = (tile_starts(side, tile) for side in (height, width))
    if tile is None or len(tops) == len(lefts) == 1:
        return decode(latents)
    total: Tensor | None = None
    weights: Tensor | None = None
    for top in tops:
        for left in lefts:
            part = latents[..., top : top + tile, left : left + tile]
            pixels = checkpoint(decode, part, use_reentrant=False) if torch.is_grad_enabled() else decode(part)
            ratio = pixels.shape[-1] // part.shape[-1]
            rows, columns = (
                blend_weights(start, length, side, round(OVERLAP * tile), ratio)
                for start, length, side in ((top, part.shape[-2], height), (left, part.shape[-1], width))
            )
            weight = (rows[:, None] * columns).to(pixels)
            if total is None or weights is None:
                total = pixels.new_zeros(*pixels.shape[:-2], height * ratio, width * ratio)
                weights = pixels.new_zeros(height * ratio, width * ratio)
            inside = slice(ratio * top, ratio * top + len(rows)), slice(ratio * left, ratio * left + len(columns))
            total[..., inside[0], inside[1]] += weight * pixels
            weights[inside] += weight
    assert total is not None and weights is not None  # there is at least one tile
    return total / weights


def tile_starts(side: int, tile: int | None) -> list[int]:
    """First latents of the tiles along a side; the last tile ends where the side ends."""
    if tile is None or side <= tile:
        return [0]
    stride = tile - round(OVERLAP * tile)
    return [*range(0, side - tile, stride), side - tile]


def blend_weights(start: int, length: int, side: int, overlap: int, ratio: int) -> Tensor:
    """Weights of a tile's pixels along a side [length * ratio]: they rise and fall at edges within the image."""
    weights, ramp = torch.ones(length * ratio), overlap * ratio
    rise = (torch.arange(ramp) + 0.5) / max(ramp, 1)
    if start > 0:
        weights[:ramp] = rise
    if start + length < side:
        weights[len(weights) - ramp :] = rise.flip(0)
    return weights
