"""Advantages: how much better a reward is than expected. Pure functions of rewards, and the per-prompt tracker."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, cast

import torch
from torch import Tensor

from ..core.group_selection import GroupFilter
from ..core.objective import Context, ObjectiveState
from ..core.reward import Rubric

AdvantageKind = Literal["group", "group_mean", "global", "tracker", "centered", "leave_one_out"]


def center_groups(rewards: Tensor) -> Tensor:
    """Subtract the mean of each group; exactly 0 in a group of equal rewards: [groups, group_size]."""
    # The mean of equal numbers may be off by rounding, which division by a small eps would turn into an advantage.
    differs = rewards.amax(1, keepdim=True) > rewards.amin(1, keepdim=True)
    return (rewards - rewards.mean(1, keepdim=True)) * differs


def group_advantages(reward: Tensor, group_size: int, unbiased_std: bool = False, eps: float = 1e-4) -> Tensor:
    """GRPO: (r - mean of the group) / (standard deviation of the group + eps): [B]."""
    groups = reward.view(-1, group_size)
    std = groups.std(1, keepdim=True, correction=int(unbiased_std))
    return (center_groups(groups) / (std + eps)).flatten()


def group_mean_advantages(reward: Tensor, group_size: int, all_rewards: Tensor, eps: float = 1e-4) -> Tensor:
    """(r - mean of the group) / (standard deviation of the rewards of all ranks + eps): [B]."""
    return center_groups(reward.view(-1, group_size)).flatten() / (all_rewards.std(correction=0) + eps)


def global_advantages(reward: Tensor, all_rewards: Tensor, eps: float = 1e-4) -> Tensor:
    """(r - mean) / (standard deviation + eps) over the rewards of all ranks: [B]."""
    return (reward - all_rewards.mean()) / (all_rewards.std(correction=0) + eps)


def centered_advantages(reward: Tensor, group_size: int, *, leave_one_out: bool = False) -> Tensor:
    """r - mean of the group, or of the other samples of the group; not divided by a standard deviation: [B]."""
    factor = group_size / (group_size - 1) if leave_one_out else 1.0
    return center_groups(reward.view(-1, group_size)).flatten() * factor


def combine_advantages(rubric: Rubric, rewards: Mapping[str, Tensor], advantage: Callable[[Tensor], Tensor]) -> Tensor:
    """Weighted mean of the advantages of each reward, so that no reward dominates by its range: [B]."""
    normalized = rubric.normalized(rewards)
    total_weight = sum(abs(rubric.rewards[name].weight) for name in normalized)
    weighted = [rubric.rewards[name].weight / total_weight * advantage(score) for name, score in normalized.items()]
    return torch.stack(weighted).sum(0)


def filter_weights(
    ctx: Context[Any], reward: Tensor, group_size: int, group_filter: GroupFilter | None
) -> Tensor | None:
    """Weights [B] of the losses of samples: 0 in groups that are left out; None without a filter.

    Losses are averaged over all samples of all ranks. With `average: kept` the others' weights make up for the zeros,
    so that the mean is that over the samples that are left.
    """
    if group_filter is None:
        return None
    kept = group_filter.keeps(reward.view(-1, group_size)).float()
    share = ctx.comm.gather(kept).mean() if group_filter.average == "kept" else torch.ones_like(kept[:1])
    return (kept / share.clamp(min=1e-12)).repeat_interleave(group_size)


class PromptTracker(ObjectiveState):
    """Mean and standard deviation of the latest `size` rewards of every prompt (DDPO's per-prompt stat tracking).

    A prompt with fewer than `min_count` rewards uses the statistics of the batch.
    """

    def __init__(self, size: int, min_count: int, eps: float = 1e-6) -> None:
        self.size, self.min_count, self.eps = size, min_count, eps
        self.rewards: dict[str, list[float]] = {}

    def update(self, prompts: Sequence[str], rewards: Sequence[float]) -> dict[str, tuple[float, float]]:
        """Add a batch of all ranks. Return mean and standard deviation (plus eps) for each of its prompts."""
        batch = torch.tensor(rewards, dtype=torch.float64)
        for prompt, reward in zip(prompts, rewards, strict=True):
            self.rewards[prompt] = [*self.rewards.get(prompt, []), float(reward)][-self.size :]
        statistics: dict[str, tuple[float, float]] = {}
        for prompt in dict.fromkeys(prompts):
            history = torch.tensor(self.rewards[prompt], dtype=torch.float64)
            source = history if len(history) >= self.min_count else batch
            statistics[prompt] = source.mean().item(), source.std(correction=0).item() + self.eps
        return statistics

    def advantages(
        self, prompts: Sequence[str], reward: Tensor, all_prompts: Sequence[str], all_rewards: Tensor
    ) -> Tensor:
        """Advantages [B] of this rank's samples, after adding the samples of all ranks to the statistics."""
        statistics = self.update(all_prompts, all_rewards.tolist())
        mean, std = torch.tensor([statistics[prompt] for prompt in prompts]).to(reward).unbind(1)
        return (reward - mean) / std

    def state_dict(self) -> dict[str, Any]:
        return {"rewards": self.rewards}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.rewards = {prompt: list(rewards) for prompt, rewards in state["rewards"].items()}


def tracked_advantages(ctx: Context[Any], prompts: Sequence[str], reward: Tensor) -> Tensor:
    """Advantages [B] of this rank's samples from the `PromptTracker` that is the objective's state."""
    tracker = cast(PromptTracker, ctx.state)
    return tracker.advantages(prompts, reward, ctx.comm.gather_objects(prompts), ctx.comm.gather(reward))


def relative_advantages(
    ctx: Context[Any],
    prompts: Sequence[str],
    reward: Tensor,
    kind: AdvantageKind,
    group_size: int,
    eps: float = 1e-4,
    unbiased_std: bool = False,
) -> Tensor:
    """Advantages [B] of this rank's samples, relative to their group, the batch or the history of their prompt."""
    if kind == "group":
        return group_advantages(reward, group_size, unbiased_std, eps)
    if kind in ("centered", "leave_one_out"):
        return centered_advantages(reward, group_size, leave_one_out=kind == "leave_one_out")
    if kind == "tracker":
        return tracked_advantages(ctx, prompts, reward)
    all_rewards = ctx.comm.gather(reward)
    if kind == "group_mean":
        return group_mean_advantages(reward, group_size, all_rewards, eps)
    return global_advantages(reward, all_rewards, eps)
