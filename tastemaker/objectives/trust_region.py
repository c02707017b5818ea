"""Trust regions of GRPO: how the loss of an action keeps the policy near the one that sampled it.

All values are per action: [B, K]. Every function returns an objective to maximize and its metrics.

clip        PPO: min(r A, clip(r) A)
ratio_norm  GRPO-Guard: the same, of a ratio without bias that has the same spread at every denoising step
kl          Flow-DPPO: r A, 0 where the exact KL to the old policy is too large and grows
binary_tv   DPPO on tokens: r A, 0 where the probability of the token changed too much and moves on
drpo, spo   on tokens: r A with a quadratic penalty instead of a mask
none        r A
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from ..core.distributions import Distribution, Gaussian, SquaredErrorGaussian, expand_dims_like, mean_per_sample
from ..core.types import Segment
from .ppo import clipped_surrogate, masked_mean

TrustRegion = Literal["clip", "ratio_norm", "kl", "binary_tv", "drpo", "spo", "none"]
THRESHOLDS: dict[str, float] = {"kl": 1e-5, "binary_tv": 0.1, "drpo": 0.2, "spo": 0.2}  # if `trust_threshold` is null
NEEDS_LATENTS, NEEDS_TOKENS = ("ratio_norm", "kl"), ("binary_tv", "drpo", "spo")
MAX_LOG_RATIO = 20.0  # of drpo and spo, so that the exponential cannot overflow


def trust_region_surrogate(
    trust: TrustRegion,
    threshold: float | None,
    policy: Distribution,
    log_prob: Tensor,
    segment: Segment,
    advantage: Tensor,
    clip_range: float,
    clip_range_high: float | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """The objective of every action of a segment under a trust region, and its metrics."""
    if trust == "clip":
        return clipped_surrogate(log_prob, segment, advantage, clip_range, clip_range_high)
    if trust == "ratio_norm":
        return normalized_ratio_surrogate(policy, segment, advantage, clip_range, clip_range_high)
    limit = THRESHOLDS.get(trust, 0.0) if threshold is None else threshold
    if trust in ("drpo", "spo"):
        return quadratic_surrogate(log_prob, segment, advantage, limit, weighted=trust == "drpo")
    ratio, advantage = (log_prob - segment.log_prob).exp(), advantage[:, None]
    metrics = ratio_metrics(ratio, segment)
    if trust == "none":
        return ratio * advantage, metrics
    if trust == "kl":
        distance = kl_to_old_policy(policy, segment)
        metrics["old_kl"] = masked_mean(distance, segment.mask)
        too_far = distance >= limit
    else:
        too_far = (log_prob.exp() - segment.log_prob.exp()).abs() > limit
    dropped = (too_far & (advantage * (ratio - 1) > 0)).detach()
    metrics["dropped"] = masked_mean(dropped.to(ratio.dtype), segment.mask)
    # Selected, not multiplied: a ratio that overflows would give NaN.
    return torch.where(dropped, torch.zeros_like(ratio), ratio * advantage), metrics


def ratio_metrics(ratio: Tensor, segment: Segment) -> dict[str, Tensor]:
    return {
        "ratio": masked_mean(ratio, segment.mask),
        "ratio_deviation": masked_mean((ratio - 1).abs(), segment.mask),
    }


def normalized_ratio_surrogate(
    policy: Distribution, segment: Segment, advantage: Tensor, clip_range: float, clip_range_high: float | None = None
) -> tuple[Tensor, dict[str, Tensor]]:
    """GRPO-Guard: min(r A, clip(r) A) / (t - s) with log r = mean(noise * (mean - old mean)), one step per sample.

    The plain log-ratio is mean(noise * shift) / std - mean(shift^2) / (2 std^2). Without its second term the mean
    ratio is 1, and times std its spread, and so the clip, is the same at every noise level. Divided by the length of
    the step, every step of Flow-SDE has the same gradient.
    """
    mean, std, old_mean = gaussian_parts(policy, segment)
    noise = (segment.action - old_mean) / expand_dims_like(std, mean)
    log_ratio = mean_per_sample(noise * (mean - old_mean))
    ratio, advantage = log_ratio.exp(), advantage[:, None]
    clipped = ratio.clamp(1 - clip_range, 1 + (clip_range if clip_range_high is None else clip_range_high))
    metrics = ratio_metrics(ratio, segment)
    metrics["clip_fraction"] = masked_mean((ratio != clipped).to(ratio.dtype), segment.mask)
    objective = torch.minimum(ratio * advantage, clipped * advantage)
    return objective / (segment.t - segment.s)[:, None], metrics


def kl_to_old_policy(policy: Distribution, segment: Segment) -> Tensor:
    """KL of the current and the sampling policy, mean((mean - old mean)^2) / (2 std^2), without gradient: [B, 1]."""
    mean, std, old_mean = gaussian_parts(policy, segment)
    shift = (mean - old_mean).detach() / expand_dims_like(std, mean)
    return mean_per_sample(shift**2) / 2


def gaussian_parts(policy: Distribution, segment: Segment) -> tuple[Tensor, Tensor, Tensor]:
    """Mean and standard deviation of the step now, and its mean when it was sampled."""
    if not isinstance(policy, (Gaussian, SquaredErrorGaussian)) or segment.mean is None:
        raise TypeError(
            "objective.trust: ratio_norm and kl need denoising steps with the mean they were sampled from; set "
            "objective.trust=clip [TM1544]"
        )
    return policy.mean, policy.std, segment.mean


def quadratic_surrogate(
    log_prob: Tensor, segment: Segment, advantage: Tensor, threshold: float, *, weighted: bool
) -> tuple[Tensor, dict[str, Tensor]]:
    """r A - |A| p (r - 1)^2 / (2 threshold), with p the token's probability when it was sampled, or 1 (spo).

    The gradient of drpo has the weight 1 - sign(A (r - 1)) |probability - p| / threshold.
    """
    ratio = (log_prob - segment.log_prob).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    scale = segment.log_prob.exp() if weighted else torch.ones_like(segment.log_prob)
    penalty = advantage.abs()[:, None] * scale * (ratio - 1) ** 2 / (2 * threshold)
    return ratio * advantage[:, None] - penalty, ratio_metrics(ratio, segment)
