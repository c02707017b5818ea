"""The clipped policy-gradient loss of PPO, and the KL penalty that keeps a policy near its reference.

All values are per action: [B, K], where K is 1 for one denoising step and the number of tokens otherwise.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from ..core.distributions import Distribution
from ..core.types import Segment


def clipped_surrogate(
    log_prob: Tensor,
    segment: Segment,
    advantage: Tensor,
    clip_range: float,
    clip_range_high: float | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """PPO's objective min(r A, clip(r, 1 - clip_range, 1 + clip_range_high) A) of every action, and its metrics.

    r is the probability ratio of the current policy (`log_prob` [B, K]) to the policy that sampled the segment;
    `advantage` is [B]. `clip_range_high` defaults to `clip_range`.
    """
    ratio, advantage = (log_prob - segment.log_prob).exp(), advantage[:, None]
    clipped_ratio = ratio.clamp(1 - clip_range, 1 + (clip_range if clip_range_high is None else clip_range_high))
    objective = torch.minimum(ratio * advantage, clipped_ratio * advantage)
    metrics = {
        "ratio": masked_mean(ratio, segment.mask),
        "ratio_deviation": masked_mean((ratio - 1).abs(), segment.mask),
        "clip_fraction": masked_mean((ratio != clipped_ratio).float(), segment.mask),
    }
    return objective, metrics


def importance_weights(segment: Segment, cap: float) -> Tensor | None:
    """Truncated importance sampling of 8-bit rollouts: min(p / q, cap) of each token, without gradient: [B, K].

    q is the probability that the 8-bit sampler gave the token, and p that of the same sampler in the training
    precision. None if the rollout had the training precision: all weights are 1.
    """
    if segment.precision_log_ratio is None:
        return None
    return segment.precision_log_ratio.exp().clamp(max=cap)


def rollout_precision_metrics(segments: tuple[Segment, ...], cap: float) -> dict[str, Tensor]:
    """How far 8-bit rollouts are from the training precision, [B] each; empty if they had the training precision.

    Mean importance weight, share of tokens whose weight is truncated, and Schulman's estimate of
    KL(rollout || training precision) per token.
    """
    means: dict[str, list[Tensor]] = {}
    for segment in segments:
        ratio, weights = segment.precision_log_ratio, importance_weights(segment, cap)
        if ratio is None or weights is None:
            return {}
        values = {"importance_weight": weights, "truncated": (ratio.exp() > cap).float(), "kl": ratio.expm1() - ratio}
        for name, value in values.items():
            means.setdefault(f"rollout/{name}", []).append(masked_mean(value, segment.mask))
    return {name: torch.stack(values).mean(0) for name, values in means.items()}


def k3_estimate(log_prob: Tensor, reference_log_prob: Tensor) -> Tensor:
    """Schulman's estimate of KL(policy || reference) from the actions taken: r - 1 - log r, r = reference / policy."""
    log_ratio = reference_log_prob - log_prob
    return log_ratio.expm1() - log_ratio


def kl_to_reference(
    policy: Distribution,
    reference: Distribution,
    action: Tensor,
    log_prob: Tensor,
    estimator: Literal["k3", "exact"],
) -> Tensor:
    """KL(policy || reference) of every action: [B, K], estimated from the action taken (k3) or in closed form."""
    if estimator == "k3":
        return k3_estimate(log_prob, reference.log_prob(action))
    return policy.kl(reference)


def masked_mean(x: Tensor, mask: Tensor) -> Tensor:
    """Mean over the actions that were taken, without gradient: [B] of [B, K]."""
    return ((x * mask).sum(1) / mask.sum(1).clamp(min=1)).detach()


def count_actions(segments: tuple[Segment, ...]) -> Tensor:
    """Number of actions each sample took in all segments: [B]."""
    return torch.stack([segment.mask.sum(1) for segment in segments]).sum(0).clamp(min=1)
