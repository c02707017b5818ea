"""The noise schedule of Karras et al. (2022) with a network that predicts the velocity, as Stable Video Diffusion's."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ..core.distributions import broadcast_to_shape
from .paths import NoisePath

LEAST, MOST = 0.002, 700.0  # noise over signal where times bend, and at t = 1
BENT = math.log1p(MOST / LEAST)


def noise_to_signal(t: Tensor) -> Tensor:
    """Noise over signal at a time: none at 0, nearly exponential above."""
    return LEAST * torch.expm1(BENT * t)


def time_of_noise(noise: Tensor) -> Tensor:
    """When there is so much noise over signal."""
    return torch.log1p(noise / LEAST) / BENT


@dataclass(frozen=True)
class KarrasPath(NoisePath):
    """Continuous levels; samples are kept at unit variance, which is how such a network sees them."""

    smallest: float = LEAST  # noise over signal that a sampler's last step begins at
    largest: float = MOST  # and its first
    bend: float = 7.0  # the higher, the more of a sampler's steps are spent where there is little noise
    middle: float = 0.7  # of training levels: the mean of the logarithm of noise over signal
    spread: float = 1.6

    def __post_init__(self) -> None:
        if not (0 < self.smallest < self.largest <= MOST and self.bend > 0 and self.spread > 0):
            found = f"smallest {self.smallest}, largest {self.largest}, bend {self.bend}, spread {self.spread}"
            raise ValueError(f"found {found}; expected 0 < smallest < largest <= {MOST:.0f}, bend and spread above 0")

    def alpha(self, t: Tensor) -> Tensor:
        return (1 + noise_to_signal(t) ** 2).rsqrt()

    def sigma(self, t: Tensor) -> Tensor:
        return noise_to_signal(t) * self.alpha(t)

    def grid(self, steps: int) -> Tensor:
        first, last = (x ** (1 / self.bend) for x in (self.largest, self.smallest))
        levels = first + torch.linspace(0, 1, steps, dtype=torch.float64) * (last - first)
        return torch.cat([time_of_noise(levels**self.bend), torch.zeros(1)]).float()

    def draw(self, uniform: Tensor) -> Tensor:
        normal = torch.special.ndtri(uniform.clamp(1e-6, 1 - 1e-6))
        return time_of_noise((self.middle + self.spread * normal).exp()).clamp(max=1)

    def target(self, clean: Tensor, noise: Tensor, t: Tensor) -> Tensor:
        return broadcast_to_shape(self.alpha(t), clean) * noise - broadcast_to_shape(self.sigma(t), clean) * clean

    def clean(self, x: Tensor, t: Tensor, output: Tensor) -> Tensor:
        return broadcast_to_shape(self.alpha(t), x) * x - broadcast_to_shape(self.sigma(t), x) * output

    def weight(self, t: Tensor) -> Tensor:
        return self.sigma(t).clamp(min=1e-4) ** -2
