"""Scores remembered, for judges that take long."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal, Protocol, Self, runtime_checkable

import torch
from pydantic import Field
from torch import Tensor

from ..core.reward import Reward, RewardSpec, load_shared_reward
from ..core.types import Metadata, Placement, Prompts
from .combinators import Combinator
from .score_cache import ScoreCache, reward_fingerprint, score_key


@runtime_checkable
class Versioned(Protocol):
    """A reward whose settings do not say all that it is."""

    @property
    def version(self) -> str: ...


@dataclass(frozen=True)
class Cached(Combinator):
    """What a reward said of the same pixels, prompt and facts before; where gradients flow, it is asked anew."""

    of: RewardSpec
    folder: Path | None = None  # kept there, for all runs and processes; in memory if not given
    entries: Annotated[int, Field(ge=1)] = 1_000_000  # remembered; the oldest are forgotten

    @property
    def reads(self) -> Literal["frames", "clip"]:
        return self.of.reads

    def load(self, placement: Placement) -> Reward:
        inner = load_shared_reward(self.of, placement)
        version = inner.version if isinstance(inner, Versioned) else ""
        book = ScoreCache(self.folder / "scores.sqlite" if self.folder else None, self.entries)
        return CachedScorer(self, inner, book, f"{reward_fingerprint(self.of)} {placement.dtype} {version}")

    def tiny(self) -> Self:
        return replace(self, of=self.of.tiny(), folder=None)

    def through(self, inner: Reward, pixels: Tensor, prompts: Prompts, facts: Sequence[Metadata]) -> Tensor:
        return inner.score(pixels, prompts, facts)


@dataclass(frozen=True)
class CachedScorer:
    spec: Cached
    inner: Reward
    book: ScoreCache
    identity: str

    def score(self, pixels: Tensor, prompts: Prompts, facts: Sequence[Metadata]) -> Tensor:
        if torch.is_grad_enabled() and pixels.requires_grad:
            return self.spec.through(self.inner, pixels, prompts, facts)
        rows = zip(pixels.detach().cpu(), prompts, facts, strict=True)
        keys = [score_key(self.identity, *row) for row in rows]
        known = self.book.get(keys)
        new = {each: place for place, each in enumerate(keys) if each not in known}  # of equal rows one
        if new:
            places = list(new.values())
            asked = [prompts[i] for i in places], [facts[i] for i in places]
            found = dict(zip(new, self.inner.score(pixels[places], *asked).tolist(), strict=True))
            self.book.put({each: score for each, score in found.items() if math.isfinite(score)})
            known |= found
        return torch.tensor([known[each] for each in keys], device=pixels.device)
