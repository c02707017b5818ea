"""Whole groups of samples in one row of experience, for objectives whose loss compares the samples of a prompt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch import Tensor

from ..core.group_selection import GroupFilter, PoolSelection
from ..core.objective import Context, rollout_and_score
from ..core.policy import Policy
from ..core.randomness import Purpose, Randomness
from ..core.registry import ConfigError
from ..core.types import Condition, Corrupted, PromptBatch, select_rows
from ..processes.gaussian import GaussianProcess
from .advantages import combine_advantages, filter_weights, group_advantages, group_mean_advantages
from .denoising_likelihood import predict_clean

Advantage = Literal["group", "group_mean"]
Combine = Literal["rewards", "advantages"]


@dataclass(frozen=True)
class SampleGroups:
    """The samples of each prompt with rewards and advantages: one row per prompt, so that no split cuts a group."""

    cond: Condition  # one row per prompt
    samples: Tensor  # [P, G, ...] clean samples in model space
    rng: Randomness  # one row per prompt
    reward: Tensor  # [P, G]
    advantage: Tensor  # [P, G]
    rewards: dict[str, Tensor]  # [P, G] of each reward, unweighted
    num_levels: int  # noise levels that one update trains at
    weight: Tensor | None = None  # [P] of the group's loss: 0 if it is filtered out; 1 if not given
    pool: dict[str, Tensor] = field(default_factory=dict)  # [P] metrics of the pool that samples were selected from

    def __len__(self) -> int:
        return len(self.cond)

    def weighted(self, rows: Tensor) -> Tensor:
        """Losses [P] of the groups, such that their mean is that over the groups that are not filtered out."""
        return rows if self.weight is None else rows * self.weight

    def metrics(self) -> dict[str, Tensor]:
        """Rewards, and the share of groups whose rewards are all equal: their advantages are 0."""
        zero_std = (self.reward.amax(1) - self.reward.amin(1) < 1e-8).float().mean()
        rewards = {f"rewards/{name}": reward for name, reward in self.rewards.items()}
        kept = {} if self.weight is None else {"kept_groups": (self.weight > 0).float()}
        return {"reward/mean": self.reward, "zero_std_groups": zero_std, **kept, **self.pool, **rewards}

    def corrupt(self, policy: Policy[GaussianProcess], level: float, noise: Tensor) -> tuple[Condition, Corrupted]:
        """All samples with `noise` [P, 1 or G, ...] at one level, and their conditions: P * G rows."""
        x = self.samples.flatten(0, 1)
        t = torch.full((len(x),), level, device=x.device)
        noisy = policy.corrupt(x, self.rng, t, noise.expand_as(self.samples).flatten(0, 1))
        return self.cond.repeat(self.samples.shape[1]), noisy


@torch.no_grad()
def collect_groups(
    ctx: Context[GaussianProcess],
    batch: PromptBatch,
    group_size: int,
    num_levels: int,
    advantage: Advantage,
    combine: Combine,
    group_filter: GroupFilter | None = None,
    keep: PoolSelection | None = None,
) -> SampleGroups:
    """Sample and score `group_size` samples per prompt; a group lives on one rank.

    `keep` selects them from a larger pool, and `group_filter` gives groups that teach little the weight 0.
    """
    trajectory, _, scores = rollout_and_score(ctx, batch, group_size, keep)
    weight = filter_weights(ctx, scores.total, group_size, group_filter)

    def compute_advantages(reward: Tensor) -> Tensor:
        if advantage == "group":
            return group_advantages(reward, group_size)
        return group_mean_advantages(reward, group_size, ctx.comm.gather(reward))

    if combine == "advantages":
        advantages = combine_advantages(ctx.rubric, scores.rewards, compute_advantages)
    else:
        advantages = compute_advantages(scores.total)

    def split(x: Tensor) -> Tensor:
        return x.view(-1, group_size, *x.shape[1:])

    return SampleGroups(
        cond=select_rows(trajectory.cond, torch.arange(0, len(trajectory), group_size)),
        samples=split(trajectory.final),
        rng=ctx.rng,
        reward=split(scores.total),
        advantage=split(advantages),
        rewards={name: split(reward) for name, reward in scores.rewards.items()},
        num_levels=num_levels,
        weight=None if weight is None else split(weight)[:, 0],
        pool={name: split(value)[:, 0] for name, value in scores.pool.items()},
    )


def draw_levels(process: GaussianProcess, rng: Randomness, count: int, pool: int, draw: int) -> Sequence[float]:
    """`count` of the first `pool` levels that the sampler visits, without replacement and the same on all ranks."""
    shared = Randomness(rng.seed, rng.step, torch.zeros(1, dtype=torch.int64))
    order = shared.uniform(Purpose.TIMESTEP, pool, draw=draw).flatten().argsort()[:count]
    levels: list[float] = process.path.timesteps(process.num_steps)[order].tolist()
    return levels


def find_level_problem(process: GaussianProcess, count: int, pool: int) -> str | None:
    """Why `count` levels cannot be drawn from the first `pool` levels of a sampler; None if they can."""
    if count <= min(pool, process.num_steps):
        return None
    return (
        f"objective.num_timesteps: {count} different noise levels are drawn from the first "
        f"{min(pool, process.num_steps)} of {process.num_steps} sampling steps; lower objective.num_timesteps, or "
        "raise process.num_steps [TM1562]"
    )


def predict_reference(
    policy: Policy[GaussianProcess], cond: Condition, noisy: Corrupted, guidance_scale: float
) -> Tensor:
    """The clean samples that the reference predicts, with classifier-free guidance if the scale is not 1: [B, ...]."""
    with policy.weights.use("reference"):
        if guidance_scale == 1:
            return predict_clean(policy, cond, noisy)
        if policy.model.guidance is None:
            raise ConfigError(
                f"objective.reference_guidance_scale: {guidance_scale} needs the unconditional prompt of a guided "
                "model; set guidance.scale above 1, or objective.reference_guidance_scale=1 [TM1563]"
            )
        guidance = replace(policy.model.guidance, scale=guidance_scale, rollouts_only=False)
        guided = policy.process.wrap_guidance(policy.model.unguided, guidance)
        return policy.process.restore(guided, cond, noisy).mean
