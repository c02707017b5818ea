"""Decode clips in overlapping tiles in space and time, so that only one tile's activations are in memory at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence

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


def decode_in_time_tiles(
    decode: Callable[[Tensor, Sequence[int]], Tensor],
    latents: Tensor,
    frames: Sequence[int],
    tile: int | None,
    ratio: int,
) -> Tensor:
    """Decode some frames of latents [B, C, f, h, w], in tiles of `tile` latents in time; None: the whole clip.

    The first latent is one frame, each other `ratio` frames. The first latent of a later tile is context only: its one
    frame is dropped. Tiles are blended linearly where they overlap; those without a frame of `frames` are left out.
    In the backward pass each tile is decoded again, one at a time.
    """
    length = latents.shape[2]
    if tile is None or length <= tile:
        return decode(latents, frames)
    overlap = max(1, round(OVERLAP * tile))
    starts = [*range(0, length - tile, max(1, tile - 1 - overlap)), length - tile]
    sums: dict[int, Tensor] = {}
    weights = dict.fromkeys(frames, 0.0)
    for start in starts:
        first, last = start * ratio + (start > 0), (start + tile - 1) * ratio  # frames of the tile, both included
        inside = [frame for frame in weights if first <= frame <= last]
        if not inside:
            continue
        part, places = latents[:, :, start : start + tile], [frame - start * ratio for frame in inside]
        pixels = (
            checkpoint(decode, part, places, use_reentrant=False) if torch.is_grad_enabled() else decode(part, places)
        )
        for index, frame in enumerate(inside):
            rise = 1.0 if start == 0 else (frame - first + 0.5) / (overlap * ratio)
            fall = 1.0 if start + tile == length else (last - frame + 0.5) / (overlap * ratio)
            weight = min(1.0, rise, fall)
            sums[frame] = sums.get(frame, 0) + weight * pixels[:, :, index]
            weights[frame] += weight
    return torch.stack([sums[frame] / weights[frame] for frame in frames], 2)


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
