"""Differentiable optical flow (Lucas-Kanade) without network weights, and motion scores based on it.

Optical flow is that of Lucas and Kanade (1981), coarse to fine.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

WORKING = 64  # pixels of the shorter side at which motion is looked for
LONGEST = 4 * WORKING  # of the other, which is squeezed if need be
COARSER = (4, 2, 1)  # than that, first to last
ROUNDS = 3  # at each of them
WINDOW = 7  # pixels that are taken to move together
DAMPING = 1e-3  # of places without texture, which seem to stand still
SMOOTH = 1e-6  # keeps the slope of a length finite where nothing moves


def motion_magnitude(pixels: Tensor, share: float = 1.0) -> Tensor:
    """The mean way of the fastest `share` of places from frame to frame, in hundredths of the shorter side: [B]."""
    rows, frames = pixels.shape[:2]
    small = resize_for_flow(pixels.flatten(0, 1))
    small = small.view(rows, frames, *small.shape[1:])
    moved = estimate_flow(small[:, :-1].flatten(0, 1), small[:, 1:].flatten(0, 1))  # [B * (F - 1), 2, h, w]
    length = (moved.square().sum(1) + SMOOTH).sqrt() - SMOOTH**0.5
    fastest = length.flatten(1).topk(max(1, round(share * length[0].numel()))).values
    step: Tensor = fastest.mean(1).view(rows, -1).mean(1)
    return step * (100 / WORKING)


def flicker_score(pixels: Tensor) -> Tensor:
    """Half the mean difference of a pixel to the mean of its two neighbours in time, motion followed: [B]."""
    rows, frames = pixels.shape[:2]
    small = resize_for_flow(pixels.flatten(0, 1))
    small = small.view(rows, frames, *small.shape[1:])
    before, now, after = (small[:, k : frames - 2 + k].flatten(0, 1) for k in range(3))
    around = (warp_frames(before, estimate_flow(now, before)) + warp_frames(after, estimate_flow(now, after))) / 2
    return (now - around).abs().mean((1, 2, 3)).view(rows, -1).mean(1) / 2


def resize_for_flow(frames: Tensor) -> Tensor:
    """Frames [N, C, H, W] at the size motion is looked for at: [N, C, h, w]."""
    height, width = frames.shape[-2:]
    scale = WORKING / min(height, width)
    sides = [min(round(side * scale), LONGEST) for side in (height, width)]
    return F.interpolate(frames, sides, mode="bilinear", antialias=True, align_corners=False)


def estimate_flow(here: Tensor, there: Tensor) -> Tensor:
    """How many pixels further right and down what is `here` [N, C, h, w] lies `there`: [N, 2, h, w]."""
    moved = here.new_zeros(len(here), 2, 1, 1)
    pair = [x.mean(1, keepdim=True) for x in (here, there)]
    for coarser in COARSER:
        first, second = (_detail(F.avg_pool2d(x, coarser)) for x in pair)
        moved = F.interpolate(moved, first.shape[-2:], mode="bilinear", align_corners=False) / coarser
        for _ in range(ROUNDS):
            moved = moved + _step(first, warp_frames(second, moved))
        moved = moved * coarser
    return moved


def warp_frames(frames: Tensor, moved: Tensor) -> Tensor:
    """Frames [N, C, h, w], each pixel fetched from where it moved to; of those outside, the nearest at the border."""
    height, width = frames.shape[-2:]
    across = torch.arange(width, device=frames.device, dtype=frames.dtype) + moved[:, 0]
    down = torch.arange(height, device=frames.device, dtype=frames.dtype)[:, None] + moved[:, 1]
    grid = torch.stack([(2 * across + 1) / width - 1, (2 * down + 1) / height - 1], -1)  # [N, h, w, 2] in [-1, 1]
    return F.grid_sample(frames, grid, mode="bilinear", padding_mode="border", align_corners=False)


def _detail(grey: Tensor) -> Tensor:
    """Without what a neighbourhood has in common, so that a change of light is not taken for motion."""
    return grey - _blurred(grey)


def _blurred(x: Tensor) -> Tensor:
    return F.avg_pool2d(x, WINDOW, 1, WINDOW // 2, count_include_pad=False)


def _step(here: Tensor, there: Tensor) -> Tensor:
    """The motion that explains the difference best, by least squares in each window: [N, 2, h, w]."""
    framed = F.pad((here + there) / 2, (1, 1, 1, 1), "replicate")
    across = (framed[..., 1:-1, 2:] - framed[..., 1:-1, :-2]) / 2
    down = (framed[..., 2:, 1:-1] - framed[..., :-2, 1:-1]) / 2
    change = there - here
    xx, yy, xy = _blurred(across.square()) + DAMPING, _blurred(down.square()) + DAMPING, _blurred(across * down)
    x, y = _blurred(across * change), _blurred(down * change)
    return torch.cat([xy * y - yy * x, xy * x - xx * y], 1) / (xx * yy - xy.square())
