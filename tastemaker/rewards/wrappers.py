"""Rewards made of other rewards: relative, clipped, stepped, per frame, shuffled and summed."""

from __future__ import annotations

import zlib
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, Self

import torch
from torch import Tensor

from ..core.randomness import Purpose, Randomness
from ..core.reward import (
    Modality,
    Reward,
    RewardCard,
    RewardSpec,
    Rubric,
    WeightedReward,
    is_shipped,
    load_shared_reward,
)
from ..core.types import Metadata, Placement, Prompts

WHOLE_BATCH = 2**20  # samples: a batch size that no batch exceeds


class RewardWrapper(RewardSpec):
    """A reward around another, whose properties it has unless it overrides them."""

    reward: RewardSpec

    @property
    def differentiable(self) -> bool:
        return self.reward.differentiable

    @property
    def modality(self) -> Modality:
        return self.reward.modality

    @property
    def needs_group(self) -> bool:
        return self.reward.needs_group

    @property
    def runs_on(self) -> Literal["device", "host", "remote"]:
        return self.reward.runs_on

    @property
    def batch_size(self) -> int:
        return self.reward.batch_size

    @property
    def card(self) -> RewardCard:
        return self.reward.card

    def load(self, placement: Placement) -> Reward:
        return WrappedScorer(self, load_shared_reward(self.reward, placement))

    def tiny(self) -> Self:
        settings: Any = self  # every wrapper is a dataclass, which an abstract class cannot say
        return replace(settings, reward=self.reward.tiny())  # type: ignore[no-any-return]

    @abstractmethod
    def score_with(self, inner: Reward, pixels: Tensor, prompts: Prompts, metadata: Sequence[Metadata]) -> Tensor:
        """Scores [B], computed with the loaded inner reward."""


@dataclass(frozen=True)
class WrappedScorer(Reward):
    spec: RewardWrapper
    inner: Reward

    @property
    def needs_copy(self) -> bool:
        return self.inner.needs_copy or not is_shipped(self.spec)

    def metrics(self) -> dict[str, float]:
        return self.inner.metrics()

    def persist_in(self, directory: Path) -> None:
        self.inner.persist_in(directory)

    def pointwise(self) -> tuple[RewardSpec, Reward] | None:
        return self.inner.pointwise()

    def score(self, pixels: Tensor, prompts: Prompts, metadata: Sequence[Metadata]) -> Tensor:
        return self.spec.score_with(self.inner, pixels, prompts, metadata)


@dataclass(frozen=True)
class RelativeReward(RewardWrapper):
    """(1 + boost) R("positive words. prompt") - R("negative words. prompt"): what the words change (SRPO)."""

    reward: RewardSpec
    positive_words: str
    negative_words: str
    positive_boost: float = 0.0

    def score_with(self, inner: Reward, pixels: Tensor, prompts: Prompts, metadata: Sequence[Metadata]) -> Tensor:
        words = (self.positive_words, self.negative_words)
        positive, negative = inner.score_prompts(
            pixels, [[f"{word}. {prompt}" for prompt in prompts] for word in words], metadata
        )
        return (1 + self.positive_boost) * positive - negative


@dataclass(frozen=True)
class ClippedReward(RewardWrapper):
    """A reward clamped to bounds; outside them its gradient is zero."""

    reward: RewardSpec
    min: float | None = None
    max: float | None = None

    def __post_init__(self) -> None:
        if self.min is None and self.max is None:
            raise ValueError("neither 'min' nor 'max' is set; set at least one of 'min' and 'max' [TM411]")
        if self.min is not None and self.max is not None and self.min >= self.max:
            raise ValueError(
                f"'min' must be below 'max', got min {self.min} and max {self.max}; correct 'min' or 'max' [TM412]"
            )

    def score_with(self, inner: Reward, pixels: Tensor, prompts: Prompts, metadata: Sequence[Metadata]) -> Tensor:
        return inner.score(pixels, prompts, metadata).clamp(self.min, self.max)


@dataclass(frozen=True)
class SteppedReward(RewardWrapper):
    """A reward mapped to a few values by thresholds, as in AR-GRPO; it has no gradient."""

    reward: RewardSpec
    thresholds: tuple[float, ...] = (0.0, 0.3, 0.6)  # rising
    values: tuple[float, ...] = (-1.0, 0.5, 1.0, 1.5)  # below the first threshold, from each threshold on

    def __post_init__(self) -> None:
        rising = all(low < high for low, high in pairwise(self.thresholds))
        if not self.thresholds or not rising or len(self.values) != len(self.thresholds) + 1:
            raise ValueError(
                f"'thresholds' is {list(self.thresholds)} and 'values' {list(self.values)}; expected rising thresholds "
                "and one value more"
                " [TM867]"
            )

    @property
    def differentiable(self) -> bool:
        return False

    def score_with(self, inner: Reward, pixels: Tensor, prompts: Prompts, metadata: Sequence[Metadata]) -> Tensor:
        scores = inner.score(pixels, prompts, metadata)
        thresholds, values = (torch.tensor(x, device=scores.device) for x in (self.thresholds, self.values))
        return values[torch.bucketize(scores.float(), thresholds, right=True)]


@dataclass(frozen=True)
class PerFrameReward(RewardWrapper):
    """An image reward of one frame of each video, or the mean over all of its frames."""

    reward: RewardSpec
    frames: Literal["all", "middle", "first", "last"] | int = "all"

    def __post_init__(self) -> None:
        require_image_reward(self.reward)

    @property
    def modality(self) -> Modality:
        # Picking a frame needs the whole video; scoring all frames one by one is what the rubric does for images.
        return "image" if self.frames == "all" else "video"

    def score_with(self, inner: Reward, pixels: Tensor, prompts: Prompts, metadata: Sequence[Metadata]) -> Tensor:
        if self.frames == "all":
            return inner.score(pixels, prompts, metadata)
        count = pixels.shape[1]
        names = {"first": 0, "middle": count // 2, "last": count - 1}
        index = names[self.frames] if isinstance(self.frames, str) else self.frames
        if not -count <= index < count:
            raise ValueError(
                f"'frames': {index} is not a frame of videos with {count} frames; choose an index below {count} [TM413]"
            )
        frame = index % count
        return inner.score(pixels[:, frame, None], prompts, [{**fields, "frame": frame} for fields in metadata])


def require_image_reward(spec: RewardSpec) -> None:
    if spec.modality == "video":
        raise ValueError(
            f"{type(spec).__name__} scores whole videos, so no frame can be selected; use this reward without a "
            "frame wrapper [TM414]"
        )


@dataclass(frozen=True)
class ShuffledReward(RewardWrapper):
    """Give each image the score of another image in the batch; with gradients, score it against another image's prompt.

    A control: nothing can be learned from it. The order depends on the images of the batch alone, so that a resumed
    run draws the same.
    """

    reward: RewardSpec

    @property
    def batch_size(self) -> int:
        return WHOLE_BATCH  # a chunk would be shuffled only within itself

    def score_with(self, inner: Reward, pixels: Tensor, prompts: Prompts, metadata: Sequence[Metadata]) -> Tensor:
        frames = 1 + max((fields.get("frame", 0) for fields in metadata), default=0)  # of one video; they stay together
        others = [i * frames + k for i in derangement(pixels[::frames]) for k in range(frames)]
        if torch.is_grad_enabled() and pixels.requires_grad:
            # A sum of scores has the same gradient in any order, so the prompts are exchanged instead.
            return self._score(inner, pixels, [prompts[i] for i in others], [metadata[i] for i in others])
        return self._score(inner, pixels, prompts, metadata)[others]

    def _score(self, inner: Reward, pixels: Tensor, prompts: Prompts, metadata: Sequence[Metadata]) -> Tensor:
        size = len(pixels) if self.needs_group else self.reward.batch_size
        chunks = [slice(i, i + size) for i in range(0, len(pixels), size)]
        return torch.cat([inner.score(pixels[chunk], prompts[chunk], metadata[chunk]) for chunk in chunks])


def derangement(pixels: Tensor) -> list[int]:
    """A cyclic permutation of the samples, so that none keeps its place."""
    if len(pixels) < 2:
        raise ValueError("a shuffled reward needs at least two images, got one; raise the batch size [TM415]")
    means = pixels.detach().float().flatten(1).mean(1).cpu()
    key = zlib.crc32(means.numpy().tobytes())
    cycle = Randomness(0, key, torch.arange(len(pixels))).uniform(Purpose.SHUFFLED_REWARD, 1).flatten().argsort()
    others = torch.empty_like(cycle)
    others[cycle] = cycle.roll(-1)
    return [int(i) for i in others]


@dataclass(frozen=True)
class SumReward(RewardSpec):
    """A weighted sum of rewards as one reward. The `rewards` of a run are summed, and logged one by one, without it."""

    rewards: tuple[RewardSpec, ...]
    weights: tuple[float, ...] = ()  # one each; all 1 if empty

    def __post_init__(self) -> None:
        if not self.rewards or (self.weights and len(self.weights) != len(self.rewards)):
            raise ValueError(
                f"a sum has {len(self.rewards)} rewards and {len(self.weights)} weights; give at least one "
                "reward, and one weight per reward or no weights [TM416]"
            )

    @property
    def differentiable(self) -> bool:
        return all(spec.differentiable for spec, weight in self._weighted() if weight)

    @property
    def modality(self) -> Modality:
        return "video" if any(spec.modality == "video" for spec in self.rewards) else "image"

    @property
    def needs_group(self) -> bool:
        return any(spec.needs_group for spec in self.rewards)

    @property
    def runs_on(self) -> Literal["device", "host", "remote"]:
        places = {spec.runs_on for spec in self.rewards}
        return "device" if "device" in places else "host" if "host" in places else "remote"

    @property
    def batch_size(self) -> int:
        return max(spec.batch_size for spec in self.rewards)  # the rubric inside splits further

    @property
    def card(self) -> RewardCard:
        cards = [spec.card for spec in self.rewards]
        sources = tuple(dict.fromkeys(source for card in cards for source in card.sources))
        failure_modes = "; ".join(dict.fromkeys(card.failure_modes for card in cards))
        memory = "; ".join(dict.fromkeys(card.memory for card in cards))
        return RewardCard("the sum of its rewards'", failure_modes, memory, sources)

    def load(self, placement: Placement) -> SumScorer:
        parts = {
            f"{type(spec).__name__} {i}": WeightedReward(spec, load_shared_reward(spec, placement), weight)
            for i, (spec, weight) in enumerate(self._weighted())
        }
        return SumScorer(Rubric(parts))

    def tiny(self) -> Self:
        return replace(self, rewards=tuple(spec.tiny() for spec in self.rewards))

    def _weighted(self) -> list[tuple[RewardSpec, float]]:
        return list(zip(self.rewards, self.weights or (1.0,) * len(self.rewards), strict=True))


@dataclass(frozen=True)
class SumScorer(Reward):
    rubric: Rubric

    def metrics(self) -> dict[str, float]:
        parts = enumerate(self.rubric.rewards.values())
        return {f"{i}/{metric}": x for i, part in parts for metric, x in part.reward.metrics().items()}

    def persist_in(self, directory: Path) -> None:
        self.rubric.persist_in(directory)

    def score(self, pixels: Tensor, prompts: Prompts, metadata: Sequence[Metadata]) -> Tensor:
        return self.rubric.score(pixels, prompts, metadata, len(pixels)).total

    def score_groups(self, pixels: Tensor, prompts: Prompts, metadata: Sequence[Metadata], group_size: int) -> Tensor:
        return self.rubric.score(pixels, prompts, metadata, group_size).total

    def pointwise(self) -> tuple[RewardSpec, Reward] | None:
        rubric = self.rubric.pointwise()
        parts = list(rubric.rewards.values())
        if not parts:
            return None
        return SumReward(tuple(part.spec for part in parts), tuple(part.weight for part in parts)), SumScorer(rubric)
