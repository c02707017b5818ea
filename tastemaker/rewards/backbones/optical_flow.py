"""Differentiable optical flow (Lucas and Kanade, 1981, coarse to fine), and motion scores based on it."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

SHORT_SIDE = 64  # pixels at which flow is estimated
MAX_LONG_SIDE = 4 * SHORT_SIDE  # longer frames are squeezed
PYRAMID = (4, 2, 1)  # downsampling factors, coarse to fine
ITERATIONS = 3  # per level of the pyramid
WINDOW = 7  # pixels that are assumed to move together
DAMPING = 1e-3  # keeps regions without texture at zero flow
EPSILON = 1e-6  # keeps the gradient of a length finite at zero flow


def motion_magnitude(pixels: Tensor, top_fraction: float = 1.0) -> Tensor:
    """Mean flow per frame of the fastest `top_fraction` of pixels, in percent of the shorter side: [B]."""
    batch, frames = pixels.shape[:2]
    small = resize_for_flow(pixels.flatten(0, 1))
    small = small.view(batch, frames, *small.shape[1:])
    flow = estimate_flow(small[:, :-1].flatten(0, 1), small[:, 1:].flatten(0, 1))  # [B * (F - 1), 2, h, w]
    length = (flow.square().sum(1) + EPSILON).sqrt() - EPSILON**0.5
    fastest = length.flatten(1).topk(max(1, round(top_fraction * length[0].numel()))).values
    step: Tensor = fastest.mean(1).view(batch, -1).mean(1)
    return step * (100 / SHORT_SIDE)


def flicker_score(pixels: Tensor) -> Tensor:
    """Half the mean difference of a pixel to the mean of its motion-compensated neighbors in time: [B]."""
    batch, frames = pixels.shape[:2]
    small = resize_for_flow(pixels.flatten(0, 1))
    small = small.view(batch, frames, *small.shape[1:])
    previous, current, following = (small[:, k : frames - 2 + k].flatten(0, 1) for k in range(3))
    warped = (
        warp_frames(previous, estimate_flow(current, previous))
        + warp_frames(following, estimate_flow(current, following))
    ) / 2
    return (current - warped).abs().mean((1, 2, 3)).view(batch, -1).mean(1) / 2


def resize_for_flow(frames: Tensor) -> Tensor:
    """Frames [N, C, H, W] at the size for flow estimation: [N, C, h, w]."""
    height, width = frames.shape[-2:]
    scale = SHORT_SIDE / min(height, width)
    sides = [min(round(side * scale), MAX_LONG_SIDE) for side in (height, width)]
    return F.interpolate(frames, sides, mode="bilinear", antialias=True, align_corners=False)


def estimate_flow(source: Tensor, target: Tensor) -> Tensor:
    """Flow from frames to others, both [N, C, h, w], in pixels to the right and down: [N, 2, h, w]."""
    flow = source.new_zeros(len(source), 2, 1, 1)
    pair = [x.mean(1, keepdim=True) for x in (source, target)]
    for factor in PYRAMID:
        first, second = (_high_pass(F.avg_pool2d(x, factor)) for x in pair)
        flow = F.interpolate(flow, first.shape[-2:], mode="bilinear", align_corners=False) / factor
        for _ in range(ITERATIONS):
            flow = flow + _update(first, warp_frames(second, flow))
        flow = flow * factor
    return flow


def warp_frames(frames: Tensor, flow: Tensor) -> Tensor:
    """Frames [N, C, h, w] sampled along a flow; outside the frame the nearest border pixel counts."""
    height, width = frames.shape[-2:]
    x = torch.arange(width, device=frames.device, dtype=frames.dtype) + flow[:, 0]
    y = torch.arange(height, device=frames.device, dtype=frames.dtype)[:, None] + flow[:, 1]
    grid = torch.stack([(2 * x + 1) / width - 1, (2 * y + 1) / height - 1], -1)  # [N, h, w, 2] in [-1, 1]
    return F.grid_sample(frames, grid, mode="bilinear", padding_mode="border", align_corners=False)


def _high_pass(gray: Tensor) -> Tensor:
    """Remove the local mean, so that a change of light is not taken for motion."""
    return gray - _blur(gray)


def _blur(x: Tensor) -> Tensor:
    return F.avg_pool2d(x, WINDOW, 1, WINDOW // 2, count_include_pad=False)


def _update(source: Tensor, warped: Tensor) -> Tensor:
    """The least-squares flow in each window that explains the remaining difference: [N, 2, h, w]."""
    padded = F.pad((source + warped) / 2, (1, 1, 1, 1), "replicate")
    dx = (padded[..., 1:-1, 2:] - padded[..., 1:-1, :-2]) / 2
    dy = (padded[..., 2:, 1:-1] - padded[..., :-2, 1:-1]) / 2
    dt = warped - source
    xx, yy, xy = _blur(dx.square()) + DAMPING, _blur(dy.square()) + DAMPING, _blur(dx * dy)
    x, y = _blur(dx * dt), _blur(dy * dt)
    return torch.cat([xy * y - yy * x, xy * x - xx * y], 1) / (xx * yy - xy.square())
