"""AdamW by PyTorch where all is fp32, by ours where weights or moments are held in less, and the schedule."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor, nn

from ..config.schema import OptimConfig
from .low_bit_adamw import AdamWMoments, LowBitAdamW, named_state


def learning_rate(optim: OptimConfig, step: int, steps: int) -> float:
    """The learning rate of a step counted from 0: up over the warm-up, then flat or down to zero after the last."""
    if step < optim.warmup:
        return optim.lr * (step + 1) / optim.warmup
    left = 1 - (step - optim.warmup) / max(1, steps - optim.warmup)
    factor = {"constant": 1.0, "linear": left, "cosine": (1 - math.cos(math.pi * left)) / 2}[optim.schedule]
    return optim.lr * max(0.0, factor)


class Optimizer(Protocol):
    """Moves parameters against their gradients."""

    def update(self, lr: float) -> None: ...
    def state(self) -> dict[str, Tensor]:
        """Its live tensors as `<parameter>.<what>`, to be saved and loaded in place."""


def build_optimizer(
    parameters: Mapping[str, nn.Parameter], optim: OptimConfig, dtype: torch.dtype, seed: int
) -> Optimizer:
    exact = dtype == torch.float32 and optim.moments == "fp32"
    return TorchAdamW(parameters, optim) if exact else LowBitAdamW(parameters, optim, seed)


class TorchAdamW:
    """PyTorch's AdamW; only matrices and larger decay."""

    def __init__(self, parameters: Mapping[str, nn.Parameter], optim: OptimConfig, fused: bool | None = None) -> None:
        values = list(parameters.values())
        self.fused = fused = all(p.is_cuda for p in values) if fused is None else fused
        groups = [
            {"params": [p for p in values if p.ndim >= 2], "weight_decay": optim.weight_decay},
            {"params": [p for p in values if p.ndim < 2], "weight_decay": 0.0},
        ]
        self.adam = torch.optim.AdamW(
            [group for group in groups if group["params"]], optim.lr, optim.betas, optim.eps, fused=fused
        )
        self.moments: dict[str, AdamWMoments] = {}
        for name, p in parameters.items():
            # Made now, not at the first update: memory runs out early if at all, and every checkpoint has all of it.
            step = torch.zeros((), device=p.device if fused else "cpu")
            kept = AdamWMoments(
                step, torch.zeros_like(p, requires_grad=False), torch.zeros_like(p, requires_grad=False)
            )
            self.moments[name] = kept
            self.adam.state[p] = {"step": kept.step, "exp_avg": kept.exp_avg, "exp_avg_sq": kept.exp_avg_sq}

    def update(self, lr: float, refused: Tensor | None = None, shrink: Tensor | None = None) -> None:
        """A fused kernel can be told, on the device, to leave all as it is (`refused`), or what to divide by."""
        for group in self.adam.param_groups:
            group["lr"] = lr
        if refused is not None:
            # Where it looks for gradients that overflowed, and for the factor they were scaled by.
            self.adam.found_inf, self.adam.grad_scale = refused, shrink  # type: ignore[attr-defined]
        self.adam.step()

    def state(self) -> dict[str, Tensor]:
        return named_state(self.moments)
