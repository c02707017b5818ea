"""Rewards made of rewards."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Self

from torch import Tensor

from ..core.reward import Reward, RewardCard, RewardSpec, load_shared_reward, score_prompts
from ..core.types import Metadata, Placement, Prompts


class Combinator(ABC):
    """A spec around another, which it follows in all that it does not say itself."""

    of: RewardSpec

    @property
    def differentiable(self) -> bool:
        return self.of.differentiable

    @property
    def runs_on(self) -> Literal["device", "host", "remote"]:
        return self.of.runs_on

    @property
    def batch_size(self) -> int:
        return self.of.batch_size

    @property
    def about(self) -> RewardCard:
        return self.of.about

    def load(self, placement: Placement) -> Reward:
        return CombinedScorer(self, load_shared_reward(self.of, placement))

    def tiny(self) -> Self:
        settings: Any = self  # every combinator is a dataclass, which an abstract class cannot say
        return replace(settings, of=self.of.tiny())  # type: ignore[no-any-return]

    @abstractmethod
    def through(self, inner: Reward, pixels: Tensor, prompts: Prompts, facts: Sequence[Metadata]) -> Tensor:
        """The score, asked of the loaded inner reward: [B]."""


@dataclass(frozen=True)
class CombinedScorer:
    """A loaded combinator."""

    spec: Combinator
    inner: Reward

    def score(self, pixels: Tensor, prompts: Prompts, facts: Sequence[Metadata]) -> Tensor:
        return self.spec.through(self.inner, pixels, prompts, facts)


@dataclass(frozen=True)
class Relative(Combinator):
    """(1 + boost) R("praise. prompt") - R("blame. prompt"): what the words change, not what the picture had (SRPO)."""

    of: RewardSpec
    praise: str
    blame: str
    boost: float = 0.0

    @property
    def reads(self) -> Literal["frames", "clip"]:
        return self.of.reads

    def through(self, inner: Reward, pixels: Tensor, prompts: Prompts, facts: Sequence[Metadata]) -> Tensor:
        both = [[f"{word}. {prompt}" for prompt in prompts] for word in (self.praise, self.blame)]
        praised, blamed = score_prompts(inner, pixels, both, facts)
        return (1 + self.boost) * praised - blamed


@dataclass(frozen=True)
class Clipped(Combinator):
    """A reward that counts only between two bounds; outside them its gradient is zero."""

    of: RewardSpec
    low: float | None = None
    high: float | None = None

    def __post_init__(self) -> None:
        if self.low is None and self.high is None:
            raise ValueError("a clipped reward has neither 'low' nor 'high'; give at least one of them")
        if self.low is not None and self.high is not None and self.low >= self.high:
            raise ValueError(f"a clipped reward has low {self.low} and high {self.high}; low must be below high")

    @property
    def reads(self) -> Literal["frames", "clip"]:
        return self.of.reads

    def through(self, inner: Reward, pixels: Tensor, prompts: Prompts, facts: Sequence[Metadata]) -> Tensor:
        return inner.score(pixels, prompts, facts).clamp(self.low, self.high)


@dataclass(frozen=True)
class PerFrame(Combinator):
    """A reward that reads frames, asked of one frame of each clip, or of all of them and averaged."""

    of: RewardSpec
    frames: Literal["all", "middle", "first", "last"] | int = "all"

    def __post_init__(self) -> None:
        if self.of.reads == "clip":
            raise ValueError(f"{type(self.of).__name__} reads whole clips, so no frame can be picked; use it by itself")

    @property
    def reads(self) -> Literal["frames", "clip"]:
        # To pick a frame one must see the clip; all frames one by one is what the rubric does anyway.
        return "frames" if self.frames == "all" else "clip"

    def through(self, inner: Reward, pixels: Tensor, prompts: Prompts, facts: Sequence[Metadata]) -> Tensor:
        if self.frames == "all":
            return inner.score(pixels, prompts, facts)
        frame = self._place(pixels.shape[1])
        return inner.score(pixels[:, frame, None], prompts, [{**fact, "frame": frame} for fact in facts])

    def _place(self, count: int) -> int:
        named = {"first": 0, "middle": count // 2, "last": count - 1}
        place = named[self.frames] if isinstance(self.frames, str) else self.frames
        if not -count <= place < count:
            raise ValueError(f"frame {place} was asked for, but clips have {count}; choose one below {count}")
        return place % count
