"""Noise levels of forward-process objectives: laws, strata over the levels of a sample, shared random numbers."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from ..core.randomness import Randomness
from ..processes.gaussian import GaussianProcess

Sharing = Literal["independent", "group", "batch"]
TimestepSampling = Literal[
    "path", "discrete", "discrete_wo_init", "discrete_with_init", "uniform", "logit_normal"
]  # the law of training of the path, strata of the sampler's timesteps, or of continuous timesteps
MIN_UNIFORM_TIMESTEP = 0.2  # of `uniform`, before the shift
MIN_LOGIT_NORMAL_TIMESTEP = 0.01  # after the shift


def share_randomness(rng: Randomness, sharing: Sharing, rows_per_prompt: int) -> Randomness:
    """A stream whose numbers are independent, or the same for all samples of a prompt or of the whole batch."""
    if sharing == "group":
        return replace(rng, rows=rng.rows // rows_per_prompt)
    return rng.same_for_all_rows() if sharing == "batch" else rng


def stratify(uniform: Tensor) -> Tensor:
    """One number from each of K equal parts of [0, 1), in increasing order: [B, K] of uniform numbers [B, K]."""
    count = uniform.shape[1]
    return (torch.arange(count, device=uniform.device) + uniform) / count


def sample_grid_indices(uniform: Tensor, num_steps: int, law: TimestepSampling, fraction: float) -> Tensor:
    """Indices of sampling steps, one from each of K strata of the first `fraction` of all steps: [B, K] of [B, K].

    `discrete` starts at the first step (pure noise), `discrete_wo_init` at the second; `discrete_with_init` is the
    first step and K - 1 strata from the second on.
    """
    count, first = uniform.shape[1], int(law != "discrete")
    last = max(int(fraction * num_steps + 1e-6), first)
    strata = count - 1 if law == "discrete_with_init" else count
    bounds = first + torch.arange(strata + 1, device=uniform.device) * (last - first) // max(strata, 1)
    lower, width = bounds[:-1], bounds.diff()
    indices = lower + (uniform[:, :strata] * width).floor().long()
    if law == "discrete_with_init":
        indices = torch.cat([torch.zeros_like(uniform[:, :1], dtype=torch.long), indices], 1)
    return indices.clamp(max=num_steps - 1)


def sample_timesteps(
    process: GaussianProcess, uniform: Tensor, law: TimestepSampling, fraction: float, shift: float
) -> Tensor:
    """Timesteps of K corruptions of each sample from uniform numbers: [B, K] of [B, K]."""
    if law.startswith("discrete"):
        grid = process.path.timesteps(process.num_steps).to(uniform.device)
        return grid[sample_grid_indices(uniform, process.num_steps, law, fraction)]
    strata = stratify(uniform)
    if law == "path":
        return process.path.sample_timesteps(strata)
    if law == "uniform":
        return shift_timesteps(MIN_UNIFORM_TIMESTEP + (1 - MIN_UNIFORM_TIMESTEP) * strata, shift)
    normal = torch.special.ndtri(strata.clamp(1e-6, 1 - 1e-6))
    return shift_timesteps(normal.sigmoid(), shift).clamp(min=MIN_LOGIT_NORMAL_TIMESTEP)


def shift_timesteps(t: Tensor, shift: float) -> Tensor:
    """Move timesteps towards the noise, as samplers of rectified flow do: shift t / (1 + (shift - 1) t)."""
    return shift * t / (1 + (shift - 1) * t)
