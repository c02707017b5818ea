"""Sampler dynamics: one step from a noise level t to a lower level s as a distribution that is sampled and scored."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from ..core.distributions import Gaussian, SquaredErrorGaussian, expand_dims_like
from .paths import NoisePath, RectifiedFlow


@dataclass(frozen=True)
class DenoisingStep:
    """One denoising step: the current sample, the predicted clean sample and the two noise levels."""

    x: Tensor  # [B, ...]
    clean: Tensor  # [B, ...]
    t: Tensor  # [B]
    s: Tensor  # [B]
    second_timestep: float  # of the sampler; used instead of t = 1, where FlowSDE is singular


def ddim_mean(path: NoisePath, step: DenoisingStep, std: Tensor) -> Tensor:
    """Mean of DDIM's step to s: alpha(s) clean + sqrt(sigma(s)^2 - std^2) noise, the noise implied by x and clean."""
    x, clean = step.x, step.clean
    noise = (x - expand_dims_like(path.alpha(step.t), x) * clean) / expand_dims_like(path.sigma(step.t), x)
    noise_coef = (path.sigma(step.s) ** 2 - std**2).clamp(min=0).sqrt()
    return expand_dims_like(path.alpha(step.s), x) * clean + expand_dims_like(noise_coef, x) * noise


def euler_maruyama_step(step: DenoisingStep, g: Tensor) -> Gaussian:
    """Euler-Maruyama on the reverse SDE with the flow's marginals and diffusion g: mean, std = g sqrt(-dt)."""
    x, t, dt = step.x, step.t, step.s - step.t
    velocity = (x - step.clean) / expand_dims_like(t, x)
    drift = g**2 / (2 * t)
    mean = x * expand_dims_like(1 + drift * dt, x) + velocity * expand_dims_like((1 + drift * (1 - t)) * dt, x)
    return Gaussian(mean, g * (-dt).sqrt())


def exact_step(path: NoisePath, step: DenoisingStep, noise_kept: Tensor) -> Gaussian:
    """The same SDE solved exactly while the predicted clean sample stays as it is (Precise, Zou et al. 2026).

    With x = (1 - u) clean + u noise, the noise is an Ornstein-Uhlenbeck process of variance 1. From level t to level s,
    the share `noise_kept` = exp(-integral from s to t of g(u)^2 / (2 u^2) du) of it is left, and the rest is new.
    """
    std = path.sigma(step.s) * (1 - noise_kept**2).clamp(min=0).sqrt()
    return Gaussian(ddim_mean(path, step, std), std)


class SamplerDynamics(ABC):
    """How a sampler moves between noise levels."""

    supported_paths: ClassVar[type] = NoisePath

    @property
    @abstractmethod
    def stochastic(self) -> bool:
        """Whether a step adds noise."""

    @abstractmethod
    def step(self, path: NoisePath, step: DenoisingStep) -> Gaussian | SquaredErrorGaussian:
        """The distribution of the sample at level s."""


@dataclass(frozen=True)
class ODE(SamplerDynamics):
    """Deterministic: DDIM with eta 0, which is Euler's method on rectified flow."""

    stochastic: ClassVar[bool] = False

    def step(self, path: NoisePath, step: DenoisingStep) -> Gaussian:
        std = torch.zeros_like(step.t)
        return Gaussian(ddim_mean(path, step, std), std)


@dataclass(frozen=True)
class DDIM(SamplerDynamics):
    """DDIM with noise (Song et al. 2021, equation 16); eta 1 is the ancestral sampler that DDPO trains."""

    eta: float = 1.0

    def __post_init__(self) -> None:
        if not 0 <= self.eta <= 1:
            raise ValueError(
                f"'eta': expected a number from 0 (no noise) to 1 (ancestral sampling), got {self.eta}; correct 'eta' "
                "[TM326]"
            )

    @property
    def stochastic(self) -> bool:
        return self.eta > 0

    def step(self, path: NoisePath, step: DenoisingStep) -> Gaussian:
        signal_ratio, sigma = path.signal_ratio(step.t, step.s), path.sigma(step.t)
        added_variance = (sigma**2 - (path.sigma(step.s) * signal_ratio) ** 2).clamp(min=0)
        std = self.eta * path.sigma(step.s) / sigma * added_variance.sqrt()
        return Gaussian(ddim_mean(path, step, std), std)


# In few steps Euler-Maruyama adds too much noise to samples that are nearly known. The exact transition adds what the
# SDE adds, but loses the spread of samples that the prediction, fixed within a step, leaves open.
Transition = Literal["euler", "exact"]


class NoiseLevelDynamics(SamplerDynamics):
    """Dynamics on rectified flow whose noise is scaled by `noise_level`."""

    supported_paths: ClassVar[type] = RectifiedFlow
    noise_level: float

    def __post_init__(self) -> None:
        if not (self.noise_level >= 0 and math.isfinite(self.noise_level)):
            raise ValueError(
                f"'noise_level': expected a number of at least 0 (0 is no noise), got {self.noise_level}; correct "
                "'noise_level' [TM327]"
            )

    @property
    def stochastic(self) -> bool:
        return self.noise_level > 0


@dataclass(frozen=True)
class FlowSDE(NoiseLevelDynamics):
    """Flow-GRPO and MixGRPO: g = noise_level * sqrt(t / (1 - t)), with 1 - t of the second timestep when t is 1.

    The exact transition needs no such exception: the first step replaces all noise.
    """

    noise_level: float = 0.7
    transition: Transition = "euler"

    def step(self, path: NoisePath, step: DenoisingStep) -> Gaussian:
        if self.transition == "exact":
            odds_ratio = step.s * (1 - step.t) / (step.t * (1 - step.s))
            return exact_step(path, step, odds_ratio ** (self.noise_level**2 / 2))
        t_below_1 = torch.where(step.t >= 1, torch.full_like(step.t, step.second_timestep), step.t)
        return euler_maruyama_step(step, self.noise_level * (step.t / (1 - t_below_1)).sqrt())


@dataclass(frozen=True)
class DanceSDE(NoiseLevelDynamics):
    """DanceGRPO: g is constant."""

    noise_level: float = 0.3
    transition: Transition = "euler"

    def step(self, path: NoisePath, step: DenoisingStep) -> Gaussian:
        if self.transition == "exact":
            exponent = 1 / step.s.clamp(min=1e-6) - 1 / step.t
            return exact_step(path, step, torch.exp(-(self.noise_level**2) / 2 * exponent))
        return euler_maruyama_step(step, torch.full_like(step.t, self.noise_level))


@dataclass(frozen=True)
class CPS(NoiseLevelDynamics):
    """Coefficient-preserving sampling: noise of std s sin(noise_level pi/2) replaces as much of the predicted noise."""

    noise_level: float = 0.8

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.noise_level > 1:
            raise ValueError(
                f"'noise_level': expected at most 1, where all noise is new, got {self.noise_level}; lower "
                "'noise_level' [TM328]"
            )

    def step(self, path: NoisePath, step: DenoisingStep) -> SquaredErrorGaussian:
        std = step.s * math.sin(self.noise_level * math.pi / 2)
        return SquaredErrorGaussian(ddim_mean(path, step, std), std)


@dataclass(frozen=True)
class ConsistencySampling(SamplerDynamics):
    """Multistep consistency sampling: predict the clean sample, then noise it anew to the next level.

    A step is a Gaussian around alpha(s) clean with deviation sigma(s), so that its log-probability is exact. The last
    step ends at the predicted clean sample. The sampler of Sana-Sprint, and DDIM that keeps none of the noise.
    """

    stochastic: ClassVar[bool] = True

    def step(self, path: NoisePath, step: DenoisingStep) -> Gaussian:
        return Gaussian(expand_dims_like(path.alpha(step.s), step.clean) * step.clean, path.sigma(step.s))
