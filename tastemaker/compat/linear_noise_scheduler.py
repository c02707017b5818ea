"""nanoVLA-RL's `LinearNoiseScheduler` with its methods, for code that trains or samples a DiT by hand."""

from __future__ import annotations

import torch
from torch import Tensor

from ..core.distributions import expand_dims_like
from ..core.registry import ConfigError
from ..processes.paths import VariancePreserving


class LinearNoiseScheduler:
    """DDPM with linear betas, over timesteps 0 to num_timesteps - 1, in float32.

    `process.path` of a recipe is the same schedule: `scheduler.path`.
    """

    def __init__(self, num_timesteps: int = 1000, beta_start: float = 1e-4, beta_end: float = 0.02) -> None:
        if num_timesteps < 2 or not 0 < beta_start <= beta_end < 1:
            raise ConfigError(
                f"LinearNoiseScheduler: num_timesteps {num_timesteps}, beta_start {beta_start}, beta_end {beta_end}; "
                "expected at least 2 timesteps and 0 < beta_start <= beta_end < 1"
                " [TM849]"
            )
        self.num_timesteps, self.beta_start, self.beta_end = num_timesteps, beta_start, beta_end
        self.betas = torch.linspace(beta_start, beta_end, num_timesteps)
        self.alphas = 1 - self.betas
        self.alpha_cum_prod = self.alphas.cumprod(0)
        self.sqrt_alpha_cum_prod = self.alpha_cum_prod.sqrt()
        self.sqrt_one_minus_alpha_cum_prod = (1 - self.alpha_cum_prod).sqrt()

    @property
    def path(self) -> VariancePreserving:
        """The noise path of the same schedule, with the sampler's timesteps as `dit-celebhq` has them."""
        return VariancePreserving(
            "linear", self.beta_start, self.beta_end, self.num_timesteps, steps_offset=0, set_alpha_to_one=True
        )

    def add_noise(self, original: Tensor, noise: Tensor, t: Tensor) -> Tensor:
        """x_t = sqrt(alpha_bar_t) x_0 + sqrt(1 - alpha_bar_t) noise for samples [B, ...] and timesteps [B]."""
        signal = self.sqrt_alpha_cum_prod.to(original.device)[t]
        deviation = self.sqrt_one_minus_alpha_cum_prod.to(original.device)[t]
        return expand_dims_like(signal, original) * original + expand_dims_like(deviation, original) * noise

    def sample_prev_timestep(
        self, xt: Tensor, noise_pred: Tensor, t: int | Tensor, step_noise: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Draw x_(t-1) given x_t and the predicted noise at one timestep, and return it with the implied x_0.

        x_0 is clamped to [-1, 1] and not used for x_(t-1), as in the original. At t = 0 no noise is added. `step_noise`
        replaces the standard normal noise, which is otherwise drawn from torch's global generator.
        """
        index = int(t)
        beta, alpha = self.betas[index].to(xt.device), self.alphas[index].to(xt.device)
        deviation = self.sqrt_one_minus_alpha_cum_prod[index].to(xt.device)
        x0 = ((xt - deviation * noise_pred) / self.sqrt_alpha_cum_prod[index].to(xt.device)).clamp(-1, 1)
        mean = (xt - beta * noise_pred / deviation) / alpha.sqrt()
        if index == 0:
            return mean, x0
        remaining = (1 - self.alpha_cum_prod[index - 1]) / (1 - self.alpha_cum_prod[index])
        variance = remaining.to(xt.device) * beta
        return mean + variance.sqrt() * (torch.randn_like(xt) if step_noise is None else step_noise), x0
