"""Noise schedules: x_t = alpha(t) clean + sigma(t) noise, and what the network's output means on them."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import torch
from torch import Tensor

from ..distributions import like


class Path(ABC):
    @abstractmethod
    def alpha(self, t: Tensor) -> Tensor: ...
    @abstractmethod
    def sigma(self, t: Tensor) -> Tensor: ...
    @abstractmethod
    def grid(self, steps: int) -> Tensor:
        """The levels a sampler visits, from noise to the end: [steps + 1]."""

    @abstractmethod
    def draw(self, uniform: Tensor) -> Tensor:
        """Training levels from uniform numbers: [B]."""

    @abstractmethod
    def target(self, clean: Tensor, noise: Tensor, t: Tensor) -> Tensor:
        """What the network should have said."""

    @abstractmethod
    def clean(self, x: Tensor, t: Tensor, output: Tensor) -> Tensor:
        """The clean sample that the network's output implies."""

    @abstractmethod
    def weight(self, t: Tensor) -> Tensor:
        """By how much an error in the clean sample is an error in the network's own output, squared: [B]."""


@dataclass(frozen=True)
class Straight(Path):
    """Rectified flow; the network predicts the velocity noise - clean."""

    shift: float = 1.0  # above 1 visits noisy levels more often
    times: Literal["uniform", "logit_normal"] = "uniform"  # training levels
    lowest: float | None = None  # before the shift, where a sampler's last step begins; at an even share if not given
    terminal: float | None = None  # after the shift, likewise: its levels are stretched to reach it

    def __post_init__(self) -> None:
        if not self.shift > 0 or math.isinf(self.shift):
            raise ValueError(f"'shift' is {self.shift}; expected a positive number, 1 for none")
        for name, level in (("lowest", self.lowest), ("terminal", self.terminal)):
            if level is not None and not 0 < level < 1:
                raise ValueError(f"'{name}' is {level}; expected a level between 0 and 1, or none")

    def alpha(self, t: Tensor) -> Tensor:
        return 1 - t

    def sigma(self, t: Tensor) -> Tensor:
        return t

    def grid(self, steps: int) -> Tensor:
        t = torch.linspace(1, 0, steps + 1)
        if self.lowest is not None:
            t = torch.cat([torch.linspace(1, self.lowest, steps), t[-1:]])
        levels = self.shift * t / (1 + (self.shift - 1) * t)
        if self.terminal is not None and steps > 1:
            levels[:-1] = 1 - (1 - levels[:-1]) * (1 - self.terminal) / (1 - levels[-2])
        return levels

    def draw(self, uniform: Tensor) -> Tensor:
        if self.times == "logit_normal":
            uniform = torch.special.ndtri(uniform.clamp(1e-6, 1 - 1e-6)).sigmoid()
        t = uniform.clamp(1e-3, 1)
        return self.shift * t / (1 + (self.shift - 1) * t)

    def target(self, clean: Tensor, noise: Tensor, t: Tensor) -> Tensor:
        return noise - clean

    def clean(self, x: Tensor, t: Tensor, output: Tensor) -> Tensor:
        return x - like(t, x) * output

    def weight(self, t: Tensor) -> Tensor:
        return t.clamp(min=1e-3) ** -2


@lru_cache
def log_kept(betas: str, first: float, last: float, levels: int) -> Tensor:
    """log of the signal power kept at each level, none lost at the first: [levels + 1]."""
    if betas == "cosine":  # Nichol and Dhariwal 2021, equation 17
        steps = torch.arange(levels + 1, dtype=torch.float64) / levels
        kept = torch.cos((steps + 0.008) / 1.008 * math.pi / 2) ** 2
        beta = (1 - kept[1:] / kept[:-1]).clamp(max=0.999)
    elif betas == "scaled_linear":
        beta = torch.linspace(first**0.5, last**0.5, levels, dtype=torch.float64) ** 2
    else:
        beta = torch.linspace(first, last, levels, dtype=torch.float64)
    return torch.cat([torch.zeros(1, dtype=torch.float64), torch.log1p(-beta).cumsum(0)])


@dataclass(frozen=True)
class VariancePreserving(Path):
    """Diffusion in discrete levels: level k of n, from 0, is t = (k + 1)/n, and t = 0 is the clean sample."""

    betas: Literal["linear", "scaled_linear", "cosine"] = "scaled_linear"
    first: float = 0.00085
    last: float = 0.012
    levels: int = 1000
    prediction: Literal["epsilon", "velocity", "sample"] = "epsilon"
    spacing: Literal["leading", "trailing"] = "leading"  # which levels a sampler visits
    offset: int = 1  # of leading levels
    ends_clean: bool = False  # or at the first level, as Stable Diffusion does

    def __post_init__(self) -> None:
        if not (0 < self.first <= self.last < 1 and 1 < self.levels <= 100_000 and 0 <= self.offset < self.levels):
            found = f"first {self.first}, last {self.last}, levels {self.levels}, offset {self.offset}"
            raise ValueError(f"found {found}; expected 0 < first <= last < 1, 1 < levels and 0 <= offset < levels")

    def _log_kept(self, t: Tensor) -> Tensor:
        table = log_kept(self.betas, self.first, self.last, self.levels).to(t.device, torch.float32)
        place = t.float() * self.levels
        nearest = place.round()
        place = torch.where((place - nearest).abs() < 1e-3, nearest, place).clamp(0, self.levels)
        below = place.floor().long().clamp(max=self.levels - 1)
        return torch.lerp(table[below], table[below + 1], place - below)

    def alpha(self, t: Tensor) -> Tensor:
        return (self._log_kept(t) / 2).exp()

    def sigma(self, t: Tensor) -> Tensor:
        return (-torch.expm1(self._log_kept(t))).sqrt()

    def grid(self, steps: int) -> Tensor:
        if steps > self.levels:
            raise ValueError(f"{steps} sampling steps on a path of {self.levels} levels; ask for fewer steps")
        if self.spacing == "leading":
            visited = torch.arange(steps).flip(0) * (self.levels // steps) + self.offset
        else:
            visited = (self.levels - torch.arange(steps, dtype=torch.float64) * self.levels / steps).round().long() - 1
        end = 0.0 if self.ends_clean else 1 / self.levels
        return torch.cat([(visited.clamp(max=self.levels - 1) + 1) / self.levels, torch.tensor([end])])

    def draw(self, uniform: Tensor) -> Tensor:
        return ((uniform * self.levels).floor() + 1) / self.levels

    def target(self, clean: Tensor, noise: Tensor, t: Tensor) -> Tensor:
        if self.prediction == "epsilon":
            return noise
        if self.prediction == "sample":
            return clean
        return like(self.alpha(t), clean) * noise - like(self.sigma(t), clean) * clean

    def clean(self, x: Tensor, t: Tensor, output: Tensor) -> Tensor:
        alpha, sigma = like(self.alpha(t), x), like(self.sigma(t), x)
        if self.prediction == "epsilon":
            return (x - sigma * output) / alpha
        return output if self.prediction == "sample" else alpha * x - sigma * output

    def weight(self, t: Tensor) -> Tensor:
        if self.prediction == "sample":
            return torch.ones_like(t)
        sigma = self.sigma(t).clamp(min=1e-4)
        return (self.alpha(t) / sigma) ** 2 if self.prediction == "epsilon" else sigma**-2
