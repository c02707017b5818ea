"""Noise paths: x_t = alpha(t) x_0 + sigma(t) noise for t from 0 (clean) to 1 (noise), and what the network predicts.

`RectifiedFlow` is that of FLUX, SD3 and most video models, `VariancePreserving` that of DDPM and Stable Diffusion,
`KarrasPath` that of Stable Video Diffusion, `TrigFlow` that of consistency models such as Sana-Sprint.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import torch
from pydantic import PositiveInt
from torch import Tensor

from ..core.distributions import expand_dims_like

SIGNAL_SCALE_TIMESTEPS = 400  # timesteps over which VideoCrafter scales the clean sample down
MIN_LOG_SIGNAL = -80.0  # log of a signal power that is 0 beside the noise in float32
KARRAS_SIGMA_MIN, KARRAS_SIGMA_MAX = 0.002, 700.0  # of the map between t and sigma: where it bends, and at t = 1
KARRAS_LOG_RANGE = math.log1p(KARRAS_SIGMA_MAX / KARRAS_SIGMA_MIN)


class NoisePath(ABC):
    """Noise schedule and parameterization of the network's output; t is [B], samples are [B, ...]."""

    @abstractmethod
    def alpha(self, t: Tensor) -> Tensor:
        """Coefficient of the clean sample: [B]."""

    @abstractmethod
    def sigma(self, t: Tensor) -> Tensor:
        """Coefficient of the noise: [B]."""

    def signal_ratio(self, t: Tensor, s: Tensor) -> Tensor:
        """alpha(t) / alpha(s): the share of the signal at the lower level s that is left at t: [B]."""
        return self.alpha(t) / self.alpha(s)

    @abstractmethod
    def timesteps(self, num_steps: int) -> Tensor:
        """The levels that a sampler visits, from noise to clean: [num_steps + 1]."""

    @abstractmethod
    def sample_timesteps(self, uniform: Tensor) -> Tensor:
        """Training timesteps from uniform numbers: [B]."""

    @abstractmethod
    def target(self, clean: Tensor, noise: Tensor, t: Tensor) -> Tensor:
        """The regression target of the network: velocity, noise or clean sample."""

    @abstractmethod
    def clean(self, x: Tensor, t: Tensor, output: Tensor) -> Tensor:
        """The clean sample that the network's output implies."""

    @abstractmethod
    def output_error_weight(self, t: Tensor) -> Tensor:
        """Squared error of the network's output per squared error of the clean sample it implies: [B]."""


@dataclass(frozen=True)
class RectifiedFlow(NoisePath):
    """Rectified flow: alpha = 1 - t, sigma = t; the network predicts the velocity noise - clean."""

    shift: float = 1.0  # timestep shift; above 1, noisy levels are visited more often
    timestep_sampling: Literal["uniform", "logit_normal"] = "uniform"  # of training timesteps
    sigma_min: float | None = None  # level at which the last sampling step begins, before the shift; evenly spaced
    shift_terminal: float | None = None  # the same after the shift: levels are stretched to reach it
    linear_quadratic_threshold: float | None = None  # share of the noise removed linearly by the first half of steps
    # Image tokens of FLUX.2, on which the shift of its sampler depends, and on the number of steps; `shift` is for
    # training timesteps then.
    flux2_tokens: PositiveInt | None = None

    def __post_init__(self) -> None:
        if not self.shift > 0 or math.isinf(self.shift):
            raise ValueError(
                f"'shift': expected a positive number (1 is no shift), got {self.shift}; correct 'shift' [TM334]"
            )
        for name in ("sigma_min", "shift_terminal", "linear_quadratic_threshold"):
            level = getattr(self, name)
            if level is not None and not 0 < level < 1:
                raise ValueError(
                    f"'{name}': expected a level between 0 and 1, or null, got {level}; correct '{name}' [TM335]"
                )

    def alpha(self, t: Tensor) -> Tensor:
        return 1 - t

    def sigma(self, t: Tensor) -> Tensor:
        return t

    def timesteps(self, num_steps: int) -> Tensor:
        t = torch.linspace(1, 0, num_steps + 1)
        if self.sigma_min is not None:
            t = torch.cat([torch.linspace(1, self.sigma_min, num_steps), t[-1:]])
        if self.linear_quadratic_threshold is not None and num_steps > 1:
            t = linear_quadratic_levels(num_steps, self.linear_quadratic_threshold)
        shift = self.shift if self.flux2_tokens is None else flux2_shift(self.flux2_tokens, num_steps)
        levels = shift * t / (1 + (shift - 1) * t)
        if self.shift_terminal is not None and num_steps > 1:
            levels[:-1] = 1 - (1 - levels[:-1]) * (1 - self.shift_terminal) / (1 - levels[-2])
        return levels

    def sample_timesteps(self, uniform: Tensor) -> Tensor:
        if self.timestep_sampling == "logit_normal":
            uniform = torch.special.ndtri(uniform.clamp(1e-6, 1 - 1e-6)).sigmoid()
        t = uniform.clamp(1e-3, 1)
        return self.shift * t / (1 + (self.shift - 1) * t)

    def target(self, clean: Tensor, noise: Tensor, t: Tensor) -> Tensor:
        return noise - clean

    def clean(self, x: Tensor, t: Tensor, output: Tensor) -> Tensor:
        return x - expand_dims_like(t, x) * output

    def output_error_weight(self, t: Tensor) -> Tensor:
        return t.clamp(min=1e-3) ** -2


def flux2_shift(tokens: int, num_steps: int) -> float:
    """Return FLUX.2's timestep shift: its logarithm is linear in the tokens, and up to 4300 tokens in the steps too."""
    at_200_steps = 1.6927e-4 * tokens + 0.45666666
    if tokens > 4300:
        return math.exp(at_200_steps)
    at_10_steps = 8.73809524e-05 * tokens + 1.89833333
    return math.exp(at_200_steps + (at_200_steps - at_10_steps) / 190 * (num_steps - 200))


def linear_quadratic_levels(num_steps: int, threshold: float) -> Tensor:
    """Mochi's schedule: linear from 1 to 1 - threshold in half of the steps, then quadratic to 0: [num_steps + 1]."""
    half = num_steps // 2
    rest, slope = num_steps - half, threshold / half
    step = torch.arange(num_steps + 1, dtype=torch.float64)
    past_half = (step - half).clamp(min=0)
    curvature = (1 - threshold - slope * rest) / rest**2
    levels = 1 - slope * step - curvature * past_half**2
    return torch.cat([levels[:-1], torch.zeros(1)]).float()  # the last exactly 0


@lru_cache
def log_alphas_cumprod(schedule: str, beta_start: float, beta_end: float, num_timesteps: int) -> Tensor:
    """log of alpha^2 at each timestep, 0 at t = 0: [num_timesteps + 1]."""
    if schedule == "cosine":  # Nichol and Dhariwal 2021, equation 17
        t = torch.arange(num_timesteps + 1, dtype=torch.float64) / num_timesteps
        alphas_cumprod = torch.cos((t + 0.008) / 1.008 * math.pi / 2) ** 2
        betas = (1 - alphas_cumprod[1:] / alphas_cumprod[:-1]).clamp(max=0.999)
    elif schedule == "scaled_linear":
        betas = torch.linspace(beta_start**0.5, beta_end**0.5, num_timesteps, dtype=torch.float64) ** 2
    else:
        betas = torch.linspace(beta_start, beta_end, num_timesteps, dtype=torch.float64)
    return torch.cat([torch.zeros(1, dtype=torch.float64), torch.log1p(-betas).cumsum(0)])


@lru_cache
def log_alphas_cumprod_shifted(
    schedule: tuple[str, float, float, int], snr_shift_scale: float, zero_terminal_snr: bool
) -> Tensor:
    """log of alpha^2 after CogVideoX's SNR shift and the rescaling to zero terminal SNR: [num_timesteps + 1]."""
    alphas_cumprod = log_alphas_cumprod(*schedule)[1:].exp()
    alphas = (alphas_cumprod / (snr_shift_scale + (1 - snr_shift_scale) * alphas_cumprod)).sqrt()
    if zero_terminal_snr:  # Lin et al. 2023, algorithm 1
        alphas = (alphas - alphas[-1]) * alphas[0] / (alphas[0] - alphas[-1])
    return torch.cat([torch.zeros(1, dtype=torch.float64), (2 * alphas.log()).clamp(min=MIN_LOG_SIGNAL)])


@dataclass(frozen=True)
class VariancePreserving(NoisePath):
    """DDPM's discrete diffusion, with diffusers' settings: timestep k of n is t = (k + 1)/n, t = 0 the clean sample."""

    beta_schedule: Literal["linear", "scaled_linear", "cosine"] = "scaled_linear"
    beta_start: float = 0.00085
    beta_end: float = 0.012
    num_train_timesteps: int = 1000
    prediction_type: Literal["epsilon", "v_prediction", "sample"] = "epsilon"
    timestep_spacing: Literal["leading", "trailing"] = "leading"  # which timesteps a sampler visits
    steps_offset: int = 1  # of leading timesteps
    set_alpha_to_one: bool = False  # end at the clean sample; otherwise at timestep 0, as Stable Diffusion does
    final_signal_scale: float = 1.0  # scale of the clean sample from timestep 399 on (VideoCrafter)
    snr_shift_scale: float = 1.0  # divisor of the signal-to-noise ratio: 3 in CogVideoX-2B
    rescale_betas_zero_snr: bool = False  # pure noise at the last timestep; not with epsilon

    def __post_init__(self) -> None:
        if not 0 < self.snr_shift_scale < math.inf:
            raise ValueError(
                f"'snr_shift_scale': expected a positive number (1 is no shift), got {self.snr_shift_scale}; "
                "correct 'snr_shift_scale' [TM336]"
            )
        if self.rescale_betas_zero_snr and self.prediction_type == "epsilon":
            raise ValueError(
                "'rescale_betas_zero_snr': with prediction_type epsilon, the last timestep is pure noise and its "
                "prediction is undefined; set prediction_type to v_prediction or sample [TM337]"
            )
        scaled = self.final_signal_scale < 1
        if not 0 < self.final_signal_scale <= 1 or (scaled and self.prediction_type == "v_prediction"):
            raise ValueError(
                "expected final_signal_scale above 0 and at most 1, and exactly 1 with v_prediction, got "
                f"final_signal_scale {self.final_signal_scale} and prediction_type {self.prediction_type}; "
                "correct these settings [TM338]"
            )
        if not (0 < self.beta_start <= self.beta_end < 1):
            raise ValueError(
                f"expected 0 < beta_start <= beta_end < 1, got beta_start {self.beta_start}, beta_end "
                f"{self.beta_end}; correct these settings [TM339]"
            )
        if not (1 < self.num_train_timesteps <= 100_000 and 0 <= self.steps_offset < self.num_train_timesteps):
            raise ValueError(
                "expected num_train_timesteps from 2 to 100000 and steps_offset from 0 to below "
                f"num_train_timesteps, got num_train_timesteps {self.num_train_timesteps}, steps_offset "
                f"{self.steps_offset}; correct these settings [TM340]"
            )

    def _log_alphas_cumprod(self, t: Tensor) -> Tensor:
        """log of alpha^2 without the signal scale, interpolated between timesteps: [B]."""
        schedule = (self.beta_schedule, self.beta_start, self.beta_end, self.num_train_timesteps)
        if self.snr_shift_scale == 1 and not self.rescale_betas_zero_snr:
            table = log_alphas_cumprod(*schedule)
        else:
            table = log_alphas_cumprod_shifted(schedule, self.snr_shift_scale, self.rescale_betas_zero_snr)
        table = table.to(t.device, torch.float32)
        position = t.float() * self.num_train_timesteps
        nearest = position.round()
        position = torch.where((position - nearest).abs() < 1e-3, nearest, position)
        position = position.clamp(0, self.num_train_timesteps)
        below = position.floor().long().clamp(max=self.num_train_timesteps - 1)
        return torch.lerp(table[below], table[below + 1], position - below)

    def alpha(self, t: Tensor) -> Tensor:
        alpha = (self._log_alphas_cumprod(t) / 2).exp()
        if self.final_signal_scale == 1:
            return alpha
        timestep = (t.float() * self.num_train_timesteps - 1).clamp(0, SIGNAL_SCALE_TIMESTEPS - 1)
        return alpha * (1 + (self.final_signal_scale - 1) * timestep / (SIGNAL_SCALE_TIMESTEPS - 1))

    def signal_ratio(self, t: Tensor, s: Tensor) -> Tensor:
        """Without the signal scale: the published sampler adds the same noise whatever the scale is."""
        return ((self._log_alphas_cumprod(t) - self._log_alphas_cumprod(s)) / 2).exp()

    def sigma(self, t: Tensor) -> Tensor:
        return (-torch.expm1(self._log_alphas_cumprod(t))).sqrt()

    def timesteps(self, num_steps: int) -> Tensor:
        total = self.num_train_timesteps
        if num_steps > total:
            raise ValueError(
                f"'num_steps': {num_steps} sampling steps are more than the {total} timesteps of the path; lower "
                "'num_steps' [TM341]"
            )
        if self.timestep_spacing == "leading":
            visited = torch.arange(num_steps).flip(0) * (total // num_steps) + self.steps_offset
        else:
            visited = (total - torch.arange(num_steps, dtype=torch.float64) * total / num_steps).round().long() - 1
        end = 0.0 if self.set_alpha_to_one else 1 / total
        return torch.cat([(visited.clamp(max=total - 1) + 1) / total, torch.tensor([end])])

    def sample_timesteps(self, uniform: Tensor) -> Tensor:
        return ((uniform * self.num_train_timesteps).floor() + 1) / self.num_train_timesteps

    def target(self, clean: Tensor, noise: Tensor, t: Tensor) -> Tensor:
        if self.prediction_type == "epsilon":
            return noise
        if self.prediction_type == "sample":
            return clean
        return expand_dims_like(self.alpha(t), clean) * noise - expand_dims_like(self.sigma(t), clean) * clean

    def clean(self, x: Tensor, t: Tensor, output: Tensor) -> Tensor:
        alpha, sigma = expand_dims_like(self.alpha(t), x), expand_dims_like(self.sigma(t), x)
        if self.prediction_type == "epsilon":
            return (x - sigma * output) / alpha
        return output if self.prediction_type == "sample" else alpha * x - sigma * output

    def output_error_weight(self, t: Tensor) -> Tensor:
        if self.prediction_type == "sample":
            return torch.ones_like(t)
        sigma = self.sigma(t).clamp(min=1e-4)
        return (self.alpha(t) / sigma) ** 2 if self.prediction_type == "epsilon" else sigma**-2


def karras_sigma(t: Tensor) -> Tensor:
    """Noise-to-signal ratio at t: 0 at t = 0, nearly exponential above."""
    return KARRAS_SIGMA_MIN * torch.expm1(KARRAS_LOG_RANGE * t)


def karras_timestep(sigma: Tensor) -> Tensor:
    """The t at which the noise-to-signal ratio is `sigma`, the inverse of `karras_sigma`."""
    return torch.log1p(sigma / KARRAS_SIGMA_MIN) / KARRAS_LOG_RANGE


@dataclass(frozen=True)
class KarrasPath(NoisePath):
    """Karras et al. (2022) with velocity prediction, as in Stable Video Diffusion; samples have unit variance."""

    sigma_min: float = KARRAS_SIGMA_MIN  # noise-to-signal ratio at the last sampling step
    sigma_max: float = KARRAS_SIGMA_MAX  # and at the first
    rho: float = 7.0  # the higher, the more sampling steps are spent at low noise
    log_sigma_mean: float = 0.7  # of training timesteps
    log_sigma_std: float = 1.6

    def __post_init__(self) -> None:
        if not 0 < self.sigma_min < self.sigma_max <= KARRAS_SIGMA_MAX:
            raise ValueError(
                f"expected 0 < sigma_min < sigma_max <= {KARRAS_SIGMA_MAX:.0f}, got sigma_min {self.sigma_min}, "
                f"sigma_max {self.sigma_max}; correct these settings [TM342]"
            )
        if not (self.rho > 0 and self.log_sigma_std > 0):
            raise ValueError(
                f"expected rho and log_sigma_std above 0, got rho {self.rho}, log_sigma_std {self.log_sigma_std}; "
                "correct these settings [TM343]"
            )

    def alpha(self, t: Tensor) -> Tensor:
        return (1 + karras_sigma(t) ** 2).rsqrt()

    def sigma(self, t: Tensor) -> Tensor:
        return karras_sigma(t) * self.alpha(t)

    def timesteps(self, num_steps: int) -> Tensor:
        first, last = (sigma ** (1 / self.rho) for sigma in (self.sigma_max, self.sigma_min))
        ramp = first + torch.linspace(0, 1, num_steps, dtype=torch.float64) * (last - first)
        return torch.cat([karras_timestep(ramp**self.rho), torch.zeros(1)]).float()

    def sample_timesteps(self, uniform: Tensor) -> Tensor:
        normal = torch.special.ndtri(uniform.clamp(1e-6, 1 - 1e-6))
        return karras_timestep((self.log_sigma_mean + self.log_sigma_std * normal).exp()).clamp(max=1)

    def target(self, clean: Tensor, noise: Tensor, t: Tensor) -> Tensor:
        return expand_dims_like(self.alpha(t), clean) * noise - expand_dims_like(self.sigma(t), clean) * clean

    def clean(self, x: Tensor, t: Tensor, output: Tensor) -> Tensor:
        return expand_dims_like(self.alpha(t), x) * x - expand_dims_like(self.sigma(t), x) * output

    def output_error_weight(self, t: Tensor) -> Tensor:
        return self.sigma(t).clamp(min=1e-4) ** -2


def trigflow_angle(t: Tensor) -> Tensor:
    """The angle of TrigFlow at t: 0 for the clean sample, a right angle for noise."""
    return t.float() * (math.pi / 2)


@dataclass(frozen=True)
class TrigFlow(NoisePath):
    """TrigFlow (Lu and Song 2024): alpha = cos, sigma = sin of an angle; the network predicts its velocity.

    Samples have unit variance at every level. Continuous-time consistency models (sCM, Sana-Sprint) are trained on it.
    """

    intermediate_angle: float | None = 1.3  # where the second of two sampling steps begins; null: halfway
    timestep_sampling: Literal["uniform", "log_normal"] = "uniform"  # of training timesteps
    log_tangent_mean: float = -0.8  # of the logarithm of sigma / alpha, for log_normal
    log_tangent_std: float = 1.6

    def __post_init__(self) -> None:
        if self.intermediate_angle is not None and not 0 < self.intermediate_angle < math.pi / 2:
            raise ValueError(
                "'intermediate_angle': expected an angle between 0 and pi / 2, or null, got "
                f"{self.intermediate_angle}; correct 'intermediate_angle' [TM2456]"
            )
        if not self.log_tangent_std > 0:
            raise ValueError(
                f"'log_tangent_std': expected a number above 0, got {self.log_tangent_std}; correct 'log_tangent_std' "
                "[TM2457]"
            )

    def alpha(self, t: Tensor) -> Tensor:
        return trigflow_angle(t).cos()

    def sigma(self, t: Tensor) -> Tensor:
        return trigflow_angle(t).sin()

    def timesteps(self, num_steps: int) -> Tensor:
        if num_steps == 2 and self.intermediate_angle is not None:
            return torch.tensor([1.0, self.intermediate_angle / (math.pi / 2), 0.0])
        return torch.linspace(1, 0, num_steps + 1)

    def sample_timesteps(self, uniform: Tensor) -> Tensor:
        if self.timestep_sampling == "uniform":
            return uniform.clamp(1e-3, 1)
        tangent: Tensor = torch.special.ndtri(uniform.clamp(1e-6, 1 - 1e-6)) * self.log_tangent_std
        return (tangent + self.log_tangent_mean).exp().atan() / (math.pi / 2)

    def target(self, clean: Tensor, noise: Tensor, t: Tensor) -> Tensor:
        return expand_dims_like(self.alpha(t), clean) * noise - expand_dims_like(self.sigma(t), clean) * clean

    def clean(self, x: Tensor, t: Tensor, output: Tensor) -> Tensor:
        return expand_dims_like(self.alpha(t), x) * x - expand_dims_like(self.sigma(t), x) * output

    def output_error_weight(self, t: Tensor) -> Tensor:
        return self.sigma(t).clamp(min=1e-3) ** -2
