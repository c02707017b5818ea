"""By how much a reward is better than expected: pure functions of rewards, and a memory of prompts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..core.reward import Rubric


def center_groups(rows: Tensor) -> Tensor:
    """Each sample's distance from its group's mean, exactly 0 in a group of equals: [groups, group]."""
    # The mean of equals may be off by rounding, which a small floor would blow up into an advantage.
    return (rows - rows.mean(1, keepdim=True)) * (rows.amax(1, keepdim=True) > rows.amin(1, keepdim=True))


def group_advantages(reward: Tensor, group: int, unbiased: bool = False, floor: float = 1e-4) -> Tensor:
    """Against the mean and spread of the samples of the same prompt: [B]."""
    rows = reward.view(-1, group)
    spread = rows.std(1, keepdim=True, correction=int(unbiased))
    return (center_groups(rows) / (spread + floor)).flatten()


def group_mean_advantages(reward: Tensor, group: int, everyone: Tensor, floor: float = 1e-4) -> Tensor:
    """Against the mean of the same prompt, in units of the spread of all samples of all ranks: [B]."""
    return center_groups(reward.view(-1, group)).flatten() / (everyone.std(correction=0) + floor)


def global_advantages(reward: Tensor, everyone: Tensor, floor: float = 1e-4) -> Tensor:
    """Against all samples of all ranks: [B]."""
    return (reward - everyone.mean()) / (everyone.std(correction=0) + floor)


def combine_advantages(rubric: Rubric, parts: Mapping[str, Tensor], advantage: Callable[[Tensor], Tensor]) -> Tensor:
    """Each reward's own advantage by its share of all weights, so that none counts more for its range: [B]."""
    counted = rubric.counted(parts)
    whole = sum(abs(rubric.rewards[name].weight) for name in counted)
    shares = [rubric.rewards[name].weight / whole * advantage(score) for name, score in counted.items()]
    return torch.stack(shares).sum(0)


class PromptTracker:
    """The latest rewards of each prompt, as DDPO keeps them; of a prompt seen too seldom, the batch speaks."""

    def __init__(self, size: int, enough: int, floor: float = 1e-6) -> None:
        self.size, self.enough, self.floor = size, enough, floor
        self.rewards: dict[str, list[float]] = {}

    def update(self, prompts: Sequence[str], rewards: Sequence[float]) -> dict[str, tuple[float, float]]:
        """Remember a batch of all ranks, and return what to subtract and divide by for each of its prompts."""
        batch = torch.tensor(rewards, dtype=torch.float64)
        for prompt, reward in zip(prompts, rewards, strict=True):
            self.rewards[prompt] = [*self.rewards.get(prompt, []), float(reward)][-self.size :]
        known: dict[str, tuple[float, float]] = {}
        for prompt in dict.fromkeys(prompts):
            seen = torch.tensor(self.rewards[prompt], dtype=torch.float64)
            source = seen if len(seen) >= self.enough else batch
            known[prompt] = source.mean().item(), source.std(correction=0).item() + self.floor
        return known

    def advantages(self, own: Sequence[str], reward: Tensor, prompts: Sequence[str], rewards: Tensor) -> Tensor:
        """Of this rank's own samples, once those of all ranks are remembered: [B]."""
        known = self.update(prompts, rewards.tolist())
        means, spreads = torch.tensor([known[prompt] for prompt in own]).to(reward).unbind(1)
        return (reward - means) / spreads

    def state(self) -> dict[str, Any]:
        return {"rewards": self.rewards}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.rewards = {prompt: list(rewards) for prompt, rewards in state["rewards"].items()}
