"""Rewards that compare the samples of a prompt: win rate (Pref-GRPO), rank, and a bonus for diversity.

They need objectives with groups. Permuting the samples of a group permutes their scores, so nothing depends on the
order in which samples were generated.
"""

from __future__ import annotations

import zlib
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar, Literal, Self

import torch
import torch.nn.functional as F
from pydantic import NonNegativeFloat, NonNegativeInt
from torch import Tensor

from ..core.cards import WeightsSource
from ..core.group_selection import mean_ranks
from ..core.randomness import Purpose, Randomness
from ..core.reward import (
    BatchSize,
    ImageTextTower,
    Reward,
    RewardCard,
    RewardSpec,
    Rubric,
    WeightedReward,
    load_shared_reward,
)
from ..core.types import Metadata, Placement, Prompts
from .preference import load_tower, tower_settings
from .wrappers import RewardWrapper

THUMBNAIL = 32  # pixels per side, so small that grain does not count as diversity


class GroupComparison(RewardWrapper):
    """A reward that compares the samples of a prompt by another reward; it has no gradient."""

    order: Literal["both", "coin"] = "both"  # in which a pairwise reward sees two samples

    @property
    def needs_group(self) -> bool:
        return True

    @property
    def differentiable(self) -> bool:
        return False

    def load(self, placement: Placement) -> ComparisonScorer:
        return ComparisonScorer(self, load_shared_reward(self.reward, placement))

    def score_with(self, inner: Reward, pixels: Tensor, prompts: Prompts, metadata: Sequence[Metadata]) -> Tensor:
        return ComparisonScorer(self, inner).score(pixels, prompts, metadata)

    @abstractmethod
    def compare_scores(self, scores: Tensor, met: Tensor) -> Tensor:
        """Scores [N, G] of groups from those of the reward inside [N, G]; `met` [N, G, G] says who meets whom."""

    def choose_opponents(self, pixels: Tensor) -> Tensor:
        """Which samples of a group [G, F, 3, H, W] are compared: [G, G] bool, symmetric."""
        return ~torch.eye(len(pixels), dtype=torch.bool)


class ComparisonScorer(Reward):
    """Scores whole groups by a reward, then compares the samples of each."""

    def __init__(self, spec: GroupComparison, inner: Reward) -> None:
        self.spec, self.inner = spec, inner
        self.name = type(spec.reward).__name__
        # A rubric splits into batches and averages over frames. Weight 0: no gradient.
        inside = {} if spec.reward.compares_pairs else {self.name: WeightedReward(spec.reward, inner, weight=0.0)}
        self.rubric = Rubric(inside)

    @property
    def needs_copy(self) -> bool:
        return self.inner.needs_copy

    def metrics(self) -> dict[str, float]:
        return self.inner.metrics()

    def persist_in(self, directory: Path) -> None:
        self.inner.persist_in(directory)

    def pointwise(self) -> tuple[RewardSpec, Reward] | None:
        if self.spec.reward.compares_pairs:
            return None
        return self.inner.pointwise() if self.spec.reward.needs_group else (self.spec.reward, self.inner)

    def score(self, pixels: Tensor, prompts: Prompts, metadata: Sequence[Metadata]) -> Tensor:
        return self.score_groups(pixels, prompts, metadata, len(pixels))

    def score_groups(self, pixels: Tensor, prompts: Prompts, metadata: Sequence[Metadata], group_size: int) -> Tensor:
        groups = torch.split(pixels, group_size)
        met = torch.stack([self.spec.choose_opponents(group) for group in groups]).to(pixels.device)
        if self.spec.reward.compares_pairs:
            return win_rates(self._compare_pairs(pixels, prompts, metadata, met), met).flatten()
        scores = self.rubric.score(pixels, prompts, metadata, group_size).rewards[self.name]
        return self.spec.compare_scores(scores.view(-1, group_size), met).flatten()

    def _compare_pairs(self, pixels: Tensor, prompts: Prompts, metadata: Sequence[Metadata], met: Tensor) -> Tensor:
        """Probability [N, G, G] that sample i of a group beats sample j, from a pairwise reward."""
        group_size, result = met.shape[1], torch.full(met.shape, 0.5, device=pixels.device)
        group, i, j = met.triu().nonzero().unbind(1)
        first, second = group * group_size + i, group * group_size + j
        if self.spec.order == "coin":
            flip = self._coins(pixels, first, second)
            first, second = torch.where(flip, second, first), torch.where(flip, first, second)
            better = self._compare(pixels, prompts, metadata, first, second)
            better = torch.where(flip, 1 - better, better)
        else:
            better = self._compare(pixels, prompts, metadata, first, second)
            better = (better + 1 - self._compare(pixels, prompts, metadata, second, first)) / 2
        result[group, i, j], result[group, j, i] = better, 1 - better
        return result

    def _compare(
        self, pixels: Tensor, prompts: Prompts, metadata: Sequence[Metadata], first: Tensor, second: Tensor
    ) -> Tensor:
        """Probability [P] that the first samples of pairs are better, in batches of the reward."""
        chunks = []
        for a, b in zip(*(torch.split(x, self.spec.reward.batch_size) for x in (first, second)), strict=True):
            rows = a.tolist()
            known = [prompts[k] for k in rows], [metadata[k] for k in rows]
            better = self.inner.compare(pixels[a], pixels[b], *known)
            if better.shape != a.shape or not bool(((better >= 0) & (better <= 1)).all()):
                raise ValueError(
                    f"{self.name} compared {len(a)} pairs and returned {better!s:.200}; expected a number from 0 to 1 "
                    "per pair, the probability that its first sample is better [TM1583]"
                )
            chunks.append(better.float())
        return torch.cat(chunks)

    def _coins(self, pixels: Tensor, first: Tensor, second: Tensor) -> Tensor:
        """Which pairs are shown in the other order: [P] bool. A pair has the same coin wherever its samples stand."""
        keys = torch.tensor([content_key(sample) for sample in pixels])
        a, b = keys[first.cpu()], keys[second.cpu()]
        low, high = torch.minimum(a, b), torch.maximum(a, b)
        draws = Randomness(0, 0, low * 1_000_003 + high).uniform(Purpose.PAIR_ORDER, 1).flatten()
        return ((draws < 0.5) != (a == low)).to(pixels.device)


@dataclass(frozen=True)
class WinRateReward(GroupComparison):
    """The share of the other samples of the prompt that a sample beats; a tie counts half (Pref-GRPO).

    `reward` is any reward, whose scores are compared, or a pairwise reward such as `vlm_pair`. The mean is always 0.5:
    log the reward itself with weight 0 to see progress.
    """

    reward: RewardSpec
    opponents: NonNegativeInt = 0  # that each sample meets, the same number for all; 0: all others
    margin: NonNegativeFloat = 0.0  # scores that differ by no more are a tie; not for pairwise rewards
    order: Literal["both", "coin"] = "both"  # pairwise rewards see both orders, or one that a coin chooses

    @property
    def card(self) -> RewardCard:
        inner = self.reward.card
        failure_modes = f"{inner.failure_modes}; a winner among equals: use `objective.filter_groups`"
        return replace(inner, range="0 to 1, mean 0.5", failure_modes=failure_modes)

    def choose_opponents(self, pixels: Tensor) -> Tensor:
        return choose_opponents(pixels, self.opponents)

    def compare_scores(self, scores: Tensor, met: Tensor) -> Tensor:
        difference = scores[:, :, None] - scores[:, None, :]
        wins = (difference > self.margin).float() + 0.5 * (difference.abs() <= self.margin).float()
        return win_rates(wins, met)


@dataclass(frozen=True)
class RankReward(GroupComparison):
    """The rank of a sample among those of its prompt, by another reward; ties share their mean rank.

    `linear` ranks go from 0 to 1 and equal the win rate without margin. `normal` ranks are quantiles of a standard
    normal distribution, so that the best and the worst stand out.
    """

    reward: RewardSpec
    scale: Literal["linear", "normal"] = "linear"

    def __post_init__(self) -> None:
        if self.reward.compares_pairs:
            raise ValueError(
                f"'reward': {type(self.reward).__name__} compares pairs and has no scores to rank; use type: win_rate "
                "[TM1584]"
            )

    @property
    def card(self) -> RewardCard:
        values = {"linear": "0 to 1, mean 0.5", "normal": "-2 to 2, mean 0"}[self.scale]
        failure_modes = f"{self.reward.card.failure_modes}; a best sample among bad ones"
        return replace(self.reward.card, range=values, failure_modes=failure_modes)

    def compare_scores(self, scores: Tensor, met: Tensor) -> Tensor:
        ranks, count = mean_ranks(scores), scores.shape[1]
        return ranks / (count - 1) if self.scale == "linear" else torch.special.ndtri((ranks + 0.5) / count)


def win_rates(wins: Tensor, met: Tensor) -> Tensor:
    """Mean of `wins` [N, G, G] of i against j over the opponents that i `met` [N, G, G]: [N, G]."""
    return (wins * met).sum(2) / met.sum(2)


def choose_opponents(pixels: Tensor, count: int) -> Tensor:
    """Who meets whom in a group of samples [G, ...], `count` opponents each (0: all): [G, G] bool, symmetric.

    The samples stand in a circle, in an order that depends on their pixels only, and meet their nearest neighbors.
    """
    group_size = len(pixels)
    if not count or count >= group_size - 1:
        return ~torch.eye(group_size, dtype=torch.bool)
    if count % 2 and group_size % 2:
        raise ValueError(
            f"'opponents': {count} opponents for each of {group_size} samples cannot be arranged, because a pair "
            f"counts for two; set opponents to {count + 1} or to 0 [TM1585]"
        )
    place = torch.tensor([content_key(sample) for sample in pixels]).argsort(stable=True).argsort()
    distance = (place[:, None] - place[None, :]).abs()
    distance = torch.minimum(distance, group_size - distance)
    near = (distance > 0) & (distance <= count // 2)
    return near | (distance == group_size // 2) if count % 2 else near


def content_key(sample: Tensor) -> int:
    """A checksum of a sample's pixels in 8 bits; random decisions about a sample depend on it, not on its place."""
    return zlib.crc32((sample.detach().clamp(0, 1) * 255).round().to(torch.uint8).cpu().contiguous().numpy().data)


@dataclass(frozen=True)
class GroupDiversityReward(RewardSpec):
    """The mean distance of a sample to the other samples of its prompt, in pixels or in the embedding of a tower."""

    # A reward with an image-text network (clip, hps, pickscore, playground_match): the distance is 1 - cosine of
    # embeddings of the first frames. By default the root mean square distance of thumbnails of all frames.
    tower: RewardSpec | None = None
    batch_size: BatchSize = 64
    card: ClassVar[RewardCard] = RewardCard(
        range="0.05 to 0.4",
        failure_modes="samples that differ by ignoring the prompt: use a small weight",
        memory="none, or that of its tower",
    )

    def __post_init__(self) -> None:
        if self.tower is not None:
            tower_settings(self.tower)  # refuses rewards without a network of this kind

    @property
    def needs_group(self) -> bool:
        return True

    @property
    def sources(self) -> tuple[WeightsSource, ...]:
        return self.tower.sources if self.tower else ()

    def load(self, placement: Placement) -> DiversityScorer:
        return DiversityScorer(load_tower(self.tower, placement) if self.tower else None, self.batch_size)

    def tiny(self) -> Self:
        return replace(self, tower=self.tower and self.tower.tiny())


class DiversityScorer(Reward):
    """Distances between the samples of a group."""

    def __init__(self, tower: ImageTextTower | None, batch_size: int) -> None:
        self.net, self.batch_size = tower, batch_size

    def score(self, pixels: Tensor, prompts: Prompts, metadata: Sequence[Metadata]) -> Tensor:
        distance = self._distances(pixels, prompts)
        return distance.sum(1) / max(1, len(pixels) - 1)

    def _distances(self, pixels: Tensor, prompts: Prompts) -> Tensor:
        """Distances [G, G] between the samples of a group, 0 on the diagonal."""
        if self.net is None:
            height, width = (min(THUMBNAIL, side) for side in pixels.shape[-2:])
            flat = F.adaptive_avg_pool2d(pixels.flatten(1, 2), (height, width)).flatten(1)
            distance: Tensor = torch.cdist(flat, flat, compute_mode="donot_use_mm_for_euclid_dist")
            return distance.div(flat.shape[1] ** 0.5)
        chunks = [slice(i, i + self.batch_size) for i in range(0, len(pixels), self.batch_size)]
        embedding = torch.cat([self.net.encode(pixels[chunk], prompts[chunk]).image.float() for chunk in chunks])
        cosine: Tensor = embedding @ embedding.T
        return (1 - cosine) * ~torch.eye(len(pixels), dtype=torch.bool, device=pixels.device)
