"""The judge's term of PARM-guided DPO (Guo et al. 2025): minus the log reward of the model's own samples."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..core.policy import Policy, Process
from ..core.registry import ConfigError
from ..core.reward import Scores
from ..core.types import Loss, Trajectory, select_rows
from .ppo import clipped_surrogate

MIN_REWARD = 0.01  # before the logarithm: the published 1e-7 lets one bad sample outweigh all good ones
GUIDANCE_CLIP_RANGE = 0.2  # of ratios, which differ from 1 if samples are of earlier weights


@dataclass(frozen=True)
class RewardGuidanceBatch:
    """The first sample of each prompt, for the loss -log reward of PARM-guided DPO."""

    trajectory: Trajectory
    advantage: Tensor  # [B] log reward minus the mean log reward of the prompt's other samples

    def __len__(self) -> int:
        return len(self.trajectory)


def make_guidance_batch(
    trajectory: Trajectory, scores: Scores, reward_name: str, group_size: int
) -> RewardGuidanceBatch:
    """Advantages of the log reward named, or of the weighted sum if no name is given."""
    if reward_name and reward_name not in scores.rewards:
        raise ConfigError(
            f"objective.reward_guidance_name: unknown reward '{reward_name:.60}'; choose one of "
            f"{', '.join(scores.rewards)} [TM310]"
        )
    if not trajectory.segments:
        raise ConfigError(
            "objective.reward_guidance_coef: the sampler is deterministic, so its actions have no probabilities "
            "to raise; use a stochastic sampler (process.dynamics), or set objective.reward_guidance_coef=0 "
            "[TM311]"
        )
    reward = scores.rewards[reward_name] if reward_name else scores.total
    log_reward = reward.clamp(min=MIN_REWARD).log().view(-1, group_size)
    first = torch.arange(len(log_reward), device=log_reward.device) * group_size
    return RewardGuidanceBatch(select_rows(trajectory, first), log_reward[:, 0] - log_reward[:, 1:].mean(1))


def guidance_loss(policy: Policy[Process], batch: RewardGuidanceBatch, part: int) -> Loss:
    """Policy-gradient loss of E[-log reward] on one segment.

    The published term is a constant without gradient. This one has the gradient of its expectation over samples.
    """
    segment = batch.trajectory.segments[part]
    log_prob = policy.action_distribution(batch.trajectory.cond, segment).log_prob(segment.action)
    objective, metrics = clipped_surrogate(log_prob, segment, batch.advantage, GUIDANCE_CLIP_RANGE)
    metrics = {f"reward_guidance/{name}": value for name, value in metrics.items()}
    return Loss(-(objective * segment.mask).sum(1), metrics)


def check_guidance_name(name: str, coef: float) -> None:
    """Refuse the name of a guiding reward without a weight."""
    if name and not coef:
        raise ValueError(
            f"'reward_guidance_name' is {name!r:.60}, but 'reward_guidance_coef' is 0; "
            "set 'reward_guidance_coef' to a weight such as 0.1, or remove 'reward_guidance_name' [TM313]"
        )
