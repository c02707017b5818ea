"""Reconstruction losses (L1, MSE, edges, LPIPS) and PSNR."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ..config.schema import ReconstructionLossConfig
from ..core.types import Loss
from .lpips import LPIPSDistance


def edge_difference(difference: Tensor) -> Tensor:
    """L1 difference of the image gradients: [N]."""
    across, down = difference.diff(dim=-1).abs(), difference.diff(dim=-2).abs()
    return across.flatten(1).mean(1) + down.flatten(1).mean(1)


# Losses [N] of the difference [N, 3, H, W] between reconstruction and image, in [-2, 2].
LOSS_TERMS: dict[str, Callable[[Tensor], Tensor]] = {
    "l1": lambda difference: difference.abs().flatten(1).mean(1),
    "mse": lambda difference: difference.square().flatten(1).mean(1),
    "edge": edge_difference,
}


def reconstruction_loss(
    config: ReconstructionLossConfig, reconstructions: Tensor, pixels: Tensor, lpips: LPIPSDistance | None = None
) -> Loss:
    """The weighted loss per image, with its terms and the PSNR in dB as metrics."""
    difference = 2 * (reconstructions - pixels)
    weights = {"l1": config.l1, "mse": config.mse, "edge": config.gradient}
    terms = {name: LOSS_TERMS[name](difference) for name, weight in weights.items() if weight}
    if lpips is not None:
        weights["lpips"], terms["lpips"] = config.lpips, lpips(reconstructions, pixels).float()
    loss = sum((weights[name] * term for name, term in terms.items()), torch.zeros_like(difference[:, 0, 0, 0]))
    with torch.no_grad():
        metrics = {**{name: term.detach() for name, term in terms.items()}, "psnr": psnr(reconstructions, pixels)}
    return Loss(loss, metrics)


def psnr(reconstructions: Tensor, pixels: Tensor) -> Tensor:
    """Peak signal-to-noise ratio of each image in dB: [N]."""
    return -10 * (reconstructions.clamp(0, 1) - pixels).square().flatten(1).mean(1).clamp(min=1e-10).log10()
