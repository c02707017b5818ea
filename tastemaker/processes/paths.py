"""Noise schedules: x_t = alpha(t) clean + sigma(t) noise, and what the network's output means on them."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import torch
from torch import Tensor

from ..core.distributions import broadcast_to_shape

SHRINKING = 400  # levels in which the clean sample shrinks, if it does


class NoisePath(ABC):
    @abstractmethod
    def alpha(self, t: Tensor) -> Tensor: ...
    @abstractmethod
    def sigma(self, t: Tensor) -> Tensor: ...
    def lasting(self, t: Tensor, s: Tensor) -> Tensor:
        """How much of the signal of a lower level s is left at t: [B]."""
        return self.alpha(t) / self.alpha(s)

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
class RectifiedFlow(NoisePath):
    """Rectified flow; the network predicts the velocity noise - clean."""

    shift: float = 1.0  # above 1 visits noisy levels more often
    times: Literal["uniform", "logit_normal"] = "uniform"  # training levels
    lowest: float | None = None  # before the shift, where a sampler's last step begins; at an even share if not given
    terminal: float | None = None  # after the shift, likewise: its levels are stretched to reach it
    gentle: float | None = None  # of the noise, what a sampler's first half of steps takes away evenly (Mochi)

    def __post_init__(self) -> None:
        if not self.shift > 0 or math.isinf(self.shift):
            raise ValueError(f"'shift' is {self.shift}; expected a positive number, 1 for none")
        for name, level in (("lowest", self.lowest), ("terminal", self.terminal), ("gentle", self.gentle)):
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
        if self.gentle is not None and steps > 1:
            t = linear_quadratic_levels(steps, self.gentle)
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
        return x - broadcast_to_shape(t, x) * output

    def weight(self, t: Tensor) -> Tensor:
        return t.clamp(min=1e-3) ** -2


def linear_quadratic_levels(steps: int, gentle: float) -> Tensor:
    """Levels down a line for half of the steps, then down a parabola that goes on from it to 0: [steps + 1]."""
    half = steps // 2
    rest, slope = steps - half, gentle / half
    place = torch.arange(steps + 1, dtype=torch.float64)
    after = (place - half).clamp(min=0)
    bend = (1 - gentle - slope * rest) / rest**2
    levels = 1 - slope * place - bend * after**2
    return torch.cat([levels[:-1], torch.zeros(1)]).float()  # exactly, whatever was rounded


DARKEST = -80.0  # log of the signal power that stands for none: all beside it is noise in float32


@lru_cache
def log_alphas_cumprod(betas: str, first: float, last: float, levels: int) -> Tensor:
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


@lru_cache
def log_alphas_cumprod_shifted(kept: tuple[str, float, float, int], shift: float, ends_dark: bool) -> Tensor:
    """The same with all but the clean level made noisier, and with nothing kept at the last: [levels + 1]."""
    power = log_alphas_cumprod(*kept)[1:].exp()
    root = (power / (shift + (1 - shift) * power)).sqrt()
    if ends_dark:  # Lin et al. 2023, algorithm 1
        root = (root - root[-1]) * root[0] / (root[0] - root[-1])
    return torch.cat([torch.zeros(1, dtype=torch.float64), (2 * root.log()).clamp(min=DARKEST)])


@dataclass(frozen=True)
class VariancePreserving(NoisePath):
    """Diffusion in discrete levels: level k of n, from 0, is t = (k + 1)/n, and t = 0 is the clean sample."""

    betas: Literal["linear", "scaled_linear", "cosine"] = "scaled_linear"
    first: float = 0.00085
    last: float = 0.012
    levels: int = 1000
    prediction: Literal["epsilon", "velocity", "sample"] = "epsilon"
    spacing: Literal["leading", "trailing"] = "leading"  # which levels a sampler visits
    offset: int = 1  # of leading levels
    ends_clean: bool = False  # or at the first level, as Stable Diffusion does
    shrinks: float = 1.0  # what the clean sample is multiplied by from level 399 on, and less before (VideoCrafter)
    snr_shift: float = 1.0  # what signal over noise is divided by at every level: 3 in CogVideoX-2B
    ends_dark: bool = False  # nothing shows at the last level; not for epsilon, which says nothing there

    def __post_init__(self) -> None:
        if not 0 < self.snr_shift < math.inf:
            raise ValueError(f"'snr_shift' is {self.snr_shift}; expected a positive number, 1 for none")
        if self.ends_dark and self.prediction == "epsilon":
            raise ValueError("'ends_dark' with prediction 'epsilon' leaves nothing to predict; use velocity or sample")
        if not 0 < self.shrinks <= 1 or (self.shrinks < 1 and self.prediction == "velocity"):
            found = f"shrinks {self.shrinks}, prediction {self.prediction}"
            raise ValueError(f"found {found}; expected shrinks above 0 and up to 1, and 1 where velocity is predicted")
        if not (0 < self.first <= self.last < 1 and 1 < self.levels <= 100_000 and 0 <= self.offset < self.levels):
            found = f"first {self.first}, last {self.last}, levels {self.levels}, offset {self.offset}"
            raise ValueError(f"found {found}; expected 0 < first <= last < 1, 1 < levels and 0 <= offset < levels")

    def _table(self) -> Tensor:
        kept = (self.betas, self.first, self.last, self.levels)
        plain = self.snr_shift == 1 and not self.ends_dark
        return log_alphas_cumprod(*kept) if plain else log_alphas_cumprod_shifted(kept, self.snr_shift, self.ends_dark)

    def _log_kept(self, t: Tensor) -> Tensor:
        table = self._table().to(t.device, torch.float32)
        place = t.float() * self.levels
        nearest = place.round()
        place = torch.where((place - nearest).abs() < 1e-3, nearest, place).clamp(0, self.levels)
        below = place.floor().long().clamp(max=self.levels - 1)
        return torch.lerp(table[below], table[below + 1], place - below)

    def _shrunk(self, t: Tensor) -> Tensor:
        place = (t.float() * self.levels - 1).clamp(0, SHRINKING - 1)
        return 1 + (self.shrinks - 1) * place / (SHRINKING - 1)

    def alpha(self, t: Tensor) -> Tensor:
        kept = (self._log_kept(t) / 2).exp()
        return kept if self.shrinks == 1 else kept * self._shrunk(t)

    def lasting(self, t: Tensor, s: Tensor) -> Tensor:
        """By what the levels lose alone: samplers take the same noise however the sample shrinks, as published."""
        return ((self._log_kept(t) - self._log_kept(s)) / 2).exp()

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
        return broadcast_to_shape(self.alpha(t), clean) * noise - broadcast_to_shape(self.sigma(t), clean) * clean

    def clean(self, x: Tensor, t: Tensor, output: Tensor) -> Tensor:
        alpha, sigma = broadcast_to_shape(self.alpha(t), x), broadcast_to_shape(self.sigma(t), x)
        if self.prediction == "epsilon":
            return (x - sigma * output) / alpha
        return output if self.prediction == "sample" else alpha * x - sigma * output

    def weight(self, t: Tensor) -> Tensor:
        if self.prediction == "sample":
            return torch.ones_like(t)
        sigma = self.sigma(t).clamp(min=1e-4)
        return (self.alpha(t) / sigma) ** 2 if self.prediction == "epsilon" else sigma**-2
