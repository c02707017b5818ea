"""A judge's guidance beside preferences (PARM-guided DPO, Guo et al. 2025): minus the logarithm of its reward.

Published, that is a number without a graph, of which nothing learns. Here it has the gradient of its expectation over
samples: what was decided becomes likelier, the more the judge likes it better than the prompt's other samples.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..core.policy import Policy, Process
from ..core.registry import ConfigError
from ..core.reward import Scores
from ..core.types import Loss, Trajectory, select_rows
from .ppo import clipped_surrogate

FLOOR = 0.01  # rewards below it count as this: the published 1e-7 lets one bad sample outweigh all good ones
CLIP = 0.2  # of ratios, which leave 1 where samples are of earlier weights


@dataclass(frozen=True)
class RewardGuidanceBatch:
    trajectory: Trajectory  # of the first sample of each prompt, whatever it earned
    advantage: Tensor  # [B] of the logarithm of its reward over the mean of the others'

    def __len__(self) -> int:
        return len(self.trajectory)


def make_guidance_batch(trajectory: Trajectory, scores: Scores, by: str, group: int) -> RewardGuidanceBatch:
    """What a reward, or their sum if none is named, says of samples `group` by `group`."""
    if by and by not in scores.parts:
        raise ConfigError(f"objective.guide_by: there is no reward '{by:.60}'; name one of {', '.join(scores.parts)}")
    if not trajectory.segments:
        raise ConfigError("objective.guide: the sampler decides nothing at random; give it chance, or set guide to 0")
    logs = (scores.parts[by] if by else scores.total).clamp(min=FLOOR).log().view(-1, group)
    first = torch.arange(len(logs), device=logs.device) * group
    return RewardGuidanceBatch(select_rows(trajectory, first), logs[:, 0] - logs[:, 1:].mean(1))


def guidance_loss(policy: Policy[Process], seen: RewardGuidanceBatch, part: int) -> Loss:
    """The share of one segment: its gradient is that of the judge's expected minus log reward, by importance."""
    segment = seen.trajectory.segments[part]
    log_prob = policy.decide(seen.trajectory.cond, segment).log_prob(segment.action)
    gain, watched = clipped_surrogate(log_prob, segment, seen.advantage, CLIP)
    return Loss(-(gain * segment.mask).sum(1), {f"guide_{name}": value for name, value in watched.items()})
