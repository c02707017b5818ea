"""Reconstruction losses (L1, MSE, edges, LPIPS) and PSNR."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ..config.schema import ReconstructionLossConfig
from ..core.types import Loss
from .lpips import LPIPSDistance


def edge_difference(difference: Tensor) -> Tensor:
    """How much neighbouring pixels differ otherwise than they should: [N]."""
    across, down = difference.diff(dim=-1).abs(), difference.diff(dim=-2).abs()
    return across.flatten(1).mean(1) + down.flatten(1).mean(1)


# What a reconstruction may be compared by, of the difference from -2 to 2: [N, 3, H, W] -> [N].
LOSS_TERMS: dict[str, Callable[[Tensor], Tensor]] = {
    "l1": lambda difference: difference.abs().flatten(1).mean(1),
    "mse": lambda difference: difference.square().flatten(1).mean(1),
    "edge": edge_difference,
}


def reconstruction_loss(
    weights: ReconstructionLossConfig, made: Tensor, pixels: Tensor, lpips: LPIPSDistance | None = None
) -> Loss:
    """The loss of each picture, and how good the copies are in decibels."""
    difference = 2 * (made - pixels)
    found = {"l1": weights.l1, "mse": weights.mse, "edge": weights.edge}
    terms = {name: LOSS_TERMS[name](difference) for name, weight in found.items() if weight}
    if lpips is not None:
        found["lpips"], terms["lpips"] = weights.lpips, lpips(made, pixels).float()
    rows = sum((found[name] * term for name, term in terms.items()), torch.zeros_like(difference[:, 0, 0, 0]))
    with torch.no_grad():
        told = {**{name: term.detach() for name, term in terms.items()}, "psnr": psnr(made, pixels)}
    return Loss(rows, told)


def psnr(made: Tensor, pixels: Tensor) -> Tensor:
    """The peak signal-to-noise ratio of each picture: [N]."""
    return -10 * (made.clamp(0, 1) - pixels).square().flatten(1).mean(1).clamp(min=1e-10).log10()
