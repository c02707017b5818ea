"""Which groups of samples train, and which samples of a larger pool are regenerated for them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from pydantic import NonNegativeFloat, NonNegativeInt, PositiveInt
from torch import Tensor


@dataclass(frozen=True)
class GroupFilter:
    """Leave out groups whose rewards hardly differ or are high already, which teach little (Edit-R1)."""

    min_std: NonNegativeFloat = 0.05  # a standard deviation of a group's rewards up to here is low
    max_mean: float = 0.9  # a mean from here on is high
    # `both`: a group is left out if its standard deviation is low and its mean high; `either`: if one of the two holds.
    rule: Literal["both", "either"] = "both"
    # Losses are averaged over the samples that are left, each of which then weighs more, or over all, which keeps the
    # size of a step in proportion to what is left.
    average: Literal["kept", "all"] = "kept"

    def keeps(self, rewards: Tensor) -> Tensor:
        """Whether each group of rewards [groups, group_size] trains: [groups] bool."""
        low_std, high_mean = rewards.std(1, correction=0) <= self.min_std, rewards.mean(1) >= self.max_mean
        return ~(low_std & high_mean) if self.rule == "both" else ~(low_std | high_mean)


@dataclass(frozen=True)
class PoolSelection:
    """Train on the best and worst samples of a larger pool that is sampled with few steps (Sol-RL).

    The selected samples are generated again with all steps from the same noise, and scored again.
    """

    best: NonNegativeInt  # samples of each prompt that are kept, from the highest reward down
    worst: NonNegativeInt  # and from the lowest reward up
    pool_size: PositiveInt  # samples of each prompt in the pool
    pool_num_steps: PositiveInt  # sampling steps of the pool

    def __post_init__(self) -> None:
        if not 2 <= self.best + self.worst <= self.pool_size:
            raise ValueError(
                f"found best {self.best}, worst {self.worst} and pool_size {self.pool_size}; expected to keep at "
                "least 2 samples per prompt, and no more than pool_size [TM1590]"
            )

    def check_group_size(self, group_size: int) -> None:
        """Refuse a group size that is not the number of samples kept."""
        if group_size != self.best + self.worst:
            raise ValueError(
                f"'group_size' is {group_size}, but 'keep' selects {self.best} best and {self.worst} worst samples of "
                f"each prompt; set group_size to {self.best + self.worst} [TM1591]"
            )

    def pick(self, rewards: Tensor) -> Tensor:
        """Rows of the pool that are kept, by its rewards [prompts * pool_size]: best first: [prompts * kept]."""
        pools = rewards.view(-1, self.pool_size)
        order = pools.argsort(dim=1, descending=True, stable=True)
        kept = torch.cat([order[:, : self.best], order[:, self.pool_size - self.worst :]], 1)
        first = torch.arange(len(pools), device=kept.device)[:, None] * self.pool_size
        return (first + kept).flatten()


def mean_ranks(scores: Tensor) -> Tensor:
    """Ranks from 0 within each row of [N, G]; equal scores share their mean rank."""
    difference = scores[:, :, None] - scores[:, None, :]
    return (difference > 0).float().sum(2) + ((difference == 0).float().sum(2) - 1) / 2


def rank_correlation(first: Tensor, second: Tensor) -> Tensor:
    """Spearman's correlation of the scores in each row of [N, G]: [N]; 0 where all scores of a row are equal."""
    a, b = (ranks - ranks.mean(1, keepdim=True) for ranks in (mean_ranks(first), mean_ranks(second)))
    scale = (a.square().sum(1) * b.square().sum(1)).sqrt()
    return (a * b).sum(1) / scale.clamp(min=1e-12)
