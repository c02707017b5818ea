"""One step from a noise level to a lower one as a distribution: the same function samples and scores."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ..core.distributions import Distribution, Gaussian, SquaredErrorGaussian, broadcast_to_shape
from .paths import NoisePath, RectifiedFlow


@dataclass(frozen=True)
class DenoisingStep:
    """One denoising step: the current sample, the predicted clean sample and the two noise levels."""

    x: Tensor  # [B, ...]
    clean: Tensor  # [B, ...]
    t: Tensor  # [B]
    s: Tensor  # [B]
    second: float  # the sampler's second level, which stands in for the first where that is singular


def ddim_mean(path: NoisePath, stride: DenoisingStep, std: Tensor) -> Tensor:
    """Go to level s as if `clean` were true, leaving room for fresh noise of `std`."""
    x, clean = stride.x, stride.clean
    noise = (x - broadcast_to_shape(path.alpha(stride.t), x) * clean) / broadcast_to_shape(path.sigma(stride.t), x)
    kept = (path.sigma(stride.s) ** 2 - std**2).clamp(min=0).sqrt()
    return broadcast_to_shape(path.alpha(stride.s), x) * clean + broadcast_to_shape(kept, x) * noise


class SamplerDynamics(ABC):
    paths: ClassVar[type] = NoisePath  # those it is defined on

    @property
    @abstractmethod
    def chance(self) -> bool: ...
    @abstractmethod
    def step(self, path: NoisePath, stride: DenoisingStep) -> Distribution: ...


@dataclass(frozen=True)
class ODE(SamplerDynamics):
    """No chance: DDIM without noise, which is Euler's method on a straight path."""

    chance: ClassVar[bool] = False

    def step(self, path: NoisePath, stride: DenoisingStep) -> Gaussian:
        std = torch.zeros_like(stride.t)
        return Gaussian(ddim_mean(path, stride, std), std)


@dataclass(frozen=True)
class DDIM(SamplerDynamics):
    """DDIM with noise (Song et al. 2021, equation 16); eta 1 is the ancestral sampler that DDPO trains."""

    eta: float = 1.0

    def __post_init__(self) -> None:
        if not 0 <= self.eta <= 1:
            raise ValueError(f"'eta' is {self.eta}; expected a number from 0 (no noise) to 1 (ancestral)")

    @property
    def chance(self) -> bool:
        return self.eta > 0

    def step(self, path: NoisePath, stride: DenoisingStep) -> Gaussian:
        lasting, sigma = path.lasting(stride.t, stride.s), path.sigma(stride.t)
        fresh = (sigma**2 - (path.sigma(stride.s) * lasting) ** 2).clamp(min=0)
        std = self.eta * path.sigma(stride.s) / sigma * fresh.sqrt()
        return Gaussian(ddim_mean(path, stride, std), std)


def euler_maruyama_step(stride: DenoisingStep, g: Tensor) -> Gaussian:
    """Euler-Maruyama on the reverse SDE with the flow's marginals and diffusion g: mean, std = g sqrt(-dt)."""
    x, t, dt = stride.x, stride.t, stride.s - stride.t
    velocity = (x - stride.clean) / broadcast_to_shape(t, x)
    drift = g**2 / (2 * t)
    mean = x * broadcast_to_shape(1 + drift * dt, x) + velocity * broadcast_to_shape((1 + drift * (1 - t)) * dt, x)
    return Gaussian(mean, g * (-dt).sqrt())


def require_nonnegative(name: str, value: float) -> None:
    if not (value >= 0 and math.isfinite(value)):
        raise ValueError(f"'{name}' is {value}; expected a number of at least 0, where 0 means no noise")


@dataclass(frozen=True)
class FlowSDE(SamplerDynamics):
    """Flow-GRPO and MixGRPO: g = noise * sqrt(t / (1 - t)), taken at the second level when t is 1."""

    noise: float = 0.7
    paths: ClassVar[type] = RectifiedFlow

    def __post_init__(self) -> None:
        require_nonnegative("noise", self.noise)

    @property
    def chance(self) -> bool:
        return self.noise > 0

    def step(self, path: NoisePath, stride: DenoisingStep) -> Gaussian:
        room = 1 - torch.where(stride.t >= 1, torch.full_like(stride.t, stride.second), stride.t)
        return euler_maruyama_step(stride, self.noise * (stride.t / room).sqrt())


@dataclass(frozen=True)
class DanceSDE(SamplerDynamics):
    """DanceGRPO: g is constant."""

    noise: float = 0.3
    paths: ClassVar[type] = RectifiedFlow

    def __post_init__(self) -> None:
        require_nonnegative("noise", self.noise)

    @property
    def chance(self) -> bool:
        return self.noise > 0

    def step(self, path: NoisePath, stride: DenoisingStep) -> Gaussian:
        return euler_maruyama_step(stride, torch.full_like(stride.t, self.noise))


@dataclass(frozen=True)
class CPS(SamplerDynamics):
    """Coefficient-preserving sampling: noise of std s sin(noise pi/2) replaces as much of the predicted noise."""

    noise: float = 0.8
    paths: ClassVar[type] = RectifiedFlow

    def __post_init__(self) -> None:
        require_nonnegative("noise", self.noise)
        if self.noise > 1:
            raise ValueError(f"'noise' is {self.noise}; expected at most 1, where all of the noise is fresh")

    @property
    def chance(self) -> bool:
        return self.noise > 0

    def step(self, path: NoisePath, stride: DenoisingStep) -> SquaredErrorGaussian:
        std = stride.s * math.sin(self.noise * math.pi / 2)
        return SquaredErrorGaussian(ddim_mean(path, stride, std), std)
