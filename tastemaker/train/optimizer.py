"""AdamW for fp32 weights (PyTorch's) and for bf16 weights (ours, rounding stochastically), and the schedule."""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from ..config.run import Optim
from . import ranks

WORD = 0xFFFFFFFF
CHUNK = 1 << 24  # elements rounded at once, which bounds the memory for random bits


def rate(optim: Optim, step: int, steps: int) -> float:
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


@dataclass(frozen=True)
class Moments:
    """What AdamW remembers of one parameter."""

    step: Tensor  # updates so far, a scalar
    exp_avg: Tensor
    exp_avg_sq: Tensor


def build(parameters: Mapping[str, nn.Parameter], optim: Optim, dtype: torch.dtype, seed: int) -> Optimizer:
    return Plain(parameters, optim) if dtype == torch.float32 else Rounding(parameters, optim, seed)


def _names(moments: Mapping[str, Moments]) -> dict[str, Tensor]:
    state: dict[str, Tensor] = {}
    for name, kept in moments.items():
        state |= {f"{name}.step": kept.step, f"{name}.exp_avg": kept.exp_avg, f"{name}.exp_avg_sq": kept.exp_avg_sq}
    return state


class Plain:
    """PyTorch's AdamW; only matrices and larger decay."""

    def __init__(self, parameters: Mapping[str, nn.Parameter], optim: Optim) -> None:
        values = list(parameters.values())
        fused = all(p.is_cuda for p in values)
        groups = [
            {"params": [p for p in values if p.ndim >= 2], "weight_decay": optim.weight_decay},
            {"params": [p for p in values if p.ndim < 2], "weight_decay": 0.0},
        ]
        self.adam = torch.optim.AdamW(
            [group for group in groups if group["params"]], optim.lr, optim.betas, optim.eps, fused=fused
        )
        self.moments: dict[str, Moments] = {}
        for name, p in parameters.items():
            # Made now, not at the first update: memory runs out early if at all, and every checkpoint has all of it.
            step = torch.zeros((), device=p.device if fused else "cpu")
            kept = Moments(step, torch.zeros_like(p, requires_grad=False), torch.zeros_like(p, requires_grad=False))
            self.moments[name] = kept
            self.adam.state[p] = {"step": kept.step, "exp_avg": kept.exp_avg, "exp_avg_sq": kept.exp_avg_sq}

    def update(self, lr: float) -> None:
        for group in self.adam.param_groups:
            group["lr"] = lr
        self.adam.step()

    def state(self) -> dict[str, Tensor]:
        return _names(self.moments)


class Rounding:
    """AdamW in fp32 on bf16 weights, rounded up or down with the probability that keeps the mean.

    The bits are a function of seed, update, parameter and element, so that a resume, a replica and any number of
    shards round alike.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], optim: Optim, seed: int) -> None:
        self.parameters, self.optim, self.seed = dict(parameters), optim, seed
        self.moments: dict[str, Moments] = {}
        for name, p in parameters.items():
            # fp32: a second moment that moves by a thousandth a step would stand still in bf16.
            kept = torch.zeros_like(p, dtype=torch.float32, requires_grad=False)
            self.moments[name] = Moments(torch.zeros(()), kept, torch.zeros_like(kept))

    def state(self) -> dict[str, Tensor]:
        return _names(self.moments)

    @torch.no_grad()
    def update(self, lr: float) -> None:
        for name, p in self.parameters.items():
            if p.grad is not None:
                self._move(name, p, p.grad, lr)

    def _move(self, name: str, p: nn.Parameter, grad: Tensor, lr: float) -> None:
        kept = self.moments[name]
        kept.step.add_(1)
        step = int(kept.step)
        key = zlib.crc32(f"{self.seed}/{step}/{name}".encode())
        decay = lr * self.optim.weight_decay if p.ndim >= 2 else 0.0
        row = p.numel() // max(1, p.shape[0])
        start = ranks.first_row(p) * row
        flat = [ranks.local(each).view(-1) for each in (p, grad, kept.exp_avg, kept.exp_avg_sq)]
        for chunks in zip(*(torch.split(each, CHUNK) for each in flat), strict=True):
            weight, slope, average, square = chunks
            moved = self._adam(weight.float(), slope.float(), average, square, step, lr, decay)
            index = torch.arange(start, start + len(weight), device=weight.device)
            weight.copy_(round_to_bf16(moved, scramble(index ^ key)))
            start += len(weight)

    def _adam(
        self, weight: Tensor, slope: Tensor, average: Tensor, square: Tensor, step: int, lr: float, decay: float
    ) -> Tensor:
        first, second = self.optim.betas
        average.lerp_(slope, 1 - first)
        square.mul_(second).addcmul_(slope, slope, value=1 - second)
        spread = (square / (1 - second**step)).sqrt_().add_(self.optim.eps)
        return weight.mul_(1 - decay).addcdiv_(average, spread, value=-lr / (1 - first**step))


def scramble(index: Tensor) -> Tensor:
    """32 random-looking bits of each number below 2**32, held in int64 (the mixer lowbias32 of C. Wellons)."""
    x = index ^ (index >> 16)
    x = (x * 0x7FEB352D) & WORD
    x = x ^ (x >> 15)
    x = (x * 0x846CA68B) & WORD
    return x ^ (x >> 16)


def round_to_bf16(x: Tensor, bits: Tensor) -> Tensor:
    """fp32 to bf16, up with the probability of the part cut off; bits: at least 16 random low bits an element."""
    # Adding noise below the last kept bit carries into it exactly as often as it should.
    noisy = x.contiguous().view(torch.int32) + (bits & 0xFFFF).to(torch.int32)
    return (noisy & -0x10000).view(torch.float32).to(torch.bfloat16)
