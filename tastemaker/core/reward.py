"""Rewards score pixels [B, F, 3, H, W] in [0, 1]; an image is a video of one frame."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Annotated, Literal, Protocol, runtime_checkable
from weakref import WeakValueDictionary

import torch
from pydantic import Field, PositiveFloat
from torch import Tensor

from .cards import RewardCard as RewardCard
from .errors import RewardError as RewardError
from .types import Metadata, Placement, Prompts

BatchSize = Annotated[int, Field(ge=1)]  # how many a call can bear


class Reward(Protocol):
    """A live scorer of pixels."""

    def score(self, pixels: Tensor, prompts: Prompts, facts: Sequence[Metadata]) -> Tensor:
        """One number a row: [B]."""


@runtime_checkable
class CachedImageReward(Protocol):
    """A reward whose image features can be computed once and scored against several prompts."""

    def see(self, pixels: Tensor) -> Tensor:
        """What is kept of the pictures: [B, ...]."""

    def compare(self, seen: Tensor, prompts: Prompts) -> Tensor:
        """The scores of these pictures: [B]."""


def score_prompts(
    reward: Reward, pixels: Tensor, several: Sequence[Prompts], facts: Sequence[Metadata]
) -> list[Tensor]:
    """Scores of the same pixels by several prompts a row, [B] for each, with one look where that will do."""
    if len(several) > 1 and isinstance(reward, CachedImageReward):
        seen = reward.see(pixels)
        return [reward.compare(seen, prompts) for prompts in several]
    return [reward.score(pixels, prompts, facts) for prompts in several]


class RewardSpec(Protocol):
    """What a configuration says of a reward; loading makes the scorer. Hashable, for equal specs share one."""

    @property
    def differentiable(self) -> bool: ...
    @property
    def reads(self) -> Literal["frames", "clip"]:
        """Each frame by itself, or the motion between them."""

    @property
    def runs_on(self) -> Literal["device", "host", "remote"]: ...
    @property
    def batch_size(self) -> int:
        """Rows one call can bear."""

    @property
    def about(self) -> RewardCard: ...
    def load(self, placement: Placement) -> Reward: ...
    def tiny(self) -> RewardSpec:
        """The same reward at random small size, for tests."""


_live: WeakValueDictionary[tuple[RewardSpec, Placement], Reward] = WeakValueDictionary()


def load_shared_reward(spec: RewardSpec, placement: Placement) -> Reward:
    """The scorer of a spec; equal specs share one for as long as anybody holds it."""
    try:
        found = _live.get((spec, placement))
    except TypeError as error:
        way_out = "make such settings tuples, or field(hash=False)"
        raise ValueError(f"{type(spec).__name__} cannot be hashed ({error}); {way_out}") from error
    if found is None:
        found = _live[spec, placement] = spec.load(placement)
    return found


@dataclass(frozen=True)
class Verdict:
    clear: Tensor  # [B] bool, the preview can be judged
    promising: Tensor  # [B] bool
    score: Tensor  # [B]


@runtime_checkable
class Verifier(Protocol):
    """A reward that can also look at an unfinished sample and decline to judge it."""

    def judge(self, pixels: Tensor, prompts: Prompts, facts: Sequence[Metadata], progress: float) -> Verdict: ...


@dataclass(frozen=True)
class Scores:
    total: Tensor  # [B]
    parts: dict[str, Tensor]  # unweighted, by reward name


@dataclass(frozen=True)
class RewardNormalization:
    """What is subtracted from scores, and what they are divided by then."""

    mean: float = 0.0
    std: PositiveFloat = 1.0


@dataclass(frozen=True)
class WeightedReward:
    """A reward and its weight in the sum. A reward of weight zero is only logged."""

    spec: RewardSpec
    reward: Reward
    weight: float = 1.0
    normalize: RewardNormalization | None = None
    clip: tuple[float, float] | None = None  # of what is normalised; outside, its gradient is zero
    held_out: bool = False  # scored by the guard and on displayed samples, not at training steps

    def counted(self, score: Tensor) -> Tensor:
        """A score as it enters the sum, before its weight."""
        if self.normalize is not None:
            score = (score - self.normalize.mean) / self.normalize.std
        return score if self.clip is None else score.clamp(*self.clip)


class Rubric:
    """A weighted sum of rewards, evaluated in chunks each can bear, those on the host beside those on the device."""

    def __init__(self, rewards: Mapping[str, WeightedReward]) -> None:
        self.rewards = dict(rewards)
        for name, graded in self.rewards.items():
            if graded.spec.batch_size < 1:
                raise ValueError(f"reward '{name}' has batch_size {graded.spec.batch_size}; it must be at least 1")
        # Pixels reach worker threads without a graph, so a reward that must pass gradients stays in the caller's.
        self._aside = [name for name, g in self.rewards.items() if g.spec.runs_on != "device" and not _learns(g)]
        self._pool = ThreadPoolExecutor(max(1, len(self._aside)), thread_name_prefix="reward")
        self._for_training: Rubric | None = None

    def for_training(self) -> Rubric:
        """The rubric without held-out rewards, which would cost time at every step and change nothing."""
        if not any(graded.held_out for graded in self.rewards.values()):
            return self
        if self._for_training is None:
            self._for_training = Rubric({name: g for name, g in self.rewards.items() if not g.held_out})
        return self._for_training

    def score(self, pixels: Tensor, prompts: Prompts, facts: Sequence[Metadata] = ()) -> Scores:
        """Each reward by itself and their weighted sum; gradients flow through those that have them and count."""
        return self.score_each(pixels, [prompts], facts)[0]

    def score_each(self, pixels: Tensor, several: Sequence[Prompts], facts: Sequence[Metadata] = ()) -> list[Scores]:
        """The same pixels by several prompts a row; rewards that look before they read look once."""
        facts = facts or [{}] * len(several[0])
        for prompts in several:
            if not len(pixels) == len(prompts) == len(facts):
                found = f"{len(pixels)} pictures, {len(prompts)} prompts and {len(facts)} facts"
                raise ValueError(f"a rubric was given {found}; expected one prompt and one fact for each picture")
        pixels = _sound(pixels, several[0]).float()
        waiting = self._submit(pixels, several, facts)
        with torch.autocast(pixels.device.type, enabled=False):  # a reward's precision is its own, not the run's
            done = {name: self._one(name, pixels, several, facts) for name in self.rewards if name not in waiting}
        parts = {name: waiting[name].result() if name in waiting else done[name] for name in self.rewards}
        return [self._summed(pixels, {name: part[i] for name, part in parts.items()}) for i in range(len(several))]

    def _summed(self, pixels: Tensor, parts: Mapping[str, Tensor]) -> Scores:
        parts = {name: part.to(pixels.device) for name, part in parts.items()}
        total = torch.zeros(len(pixels), device=pixels.device)
        for name, part in self.counted(parts).items():
            total = total + self.rewards[name].weight * part
        return Scores(total, parts)

    def counted(self, parts: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Of those that count, the scores as they enter the sum, before their weights."""
        return {name: self.rewards[name].counted(part) for name, part in parts.items() if self.rewards[name].weight}

    def _submit(
        self, pixels: Tensor, several: Sequence[Prompts], facts: Sequence[Metadata]
    ) -> dict[str, Future[list[Tensor]]]:
        if not self._aside:
            return {}
        pixels = pixels.detach().cpu()  # once for all, and before another thread's stream could read them unfinished
        return {name: self._pool.submit(self._one, name, pixels, several, facts) for name in self._aside}

    def _one(self, name: str, pixels: Tensor, several: Sequence[Prompts], facts: Sequence[Metadata]) -> list[Tensor]:
        graded, rows = self.rewards[name], len(pixels)
        if not rows:
            return [pixels.new_zeros(0) for _ in several]
        if graded.spec.reads == "frames" and pixels.shape[1] > 1:
            frames = pixels.shape[1]
            several = [[prompt for prompt in prompts for _ in range(frames)] for prompts in several]
            pixels, facts = frames_as_samples(pixels, facts)
        size, chunks = graded.spec.batch_size, []
        with nullcontext() if _learns(graded) else torch.no_grad():
            for i in range(0, len(pixels), size):
                part = slice(i, i + size)
                asked = [prompts[part] for prompts in several]
                chunks.append(_checked(name, graded, pixels[part], asked, facts[part]))
        return [torch.cat(scores).view(rows, -1).mean(1) for scores in zip(*chunks, strict=True)]


def _sound(pixels: Tensor, prompts: Prompts) -> Tensor:
    """The pixels, if they are such as rewards can look at."""
    if pixels.dim() != 5 or pixels.shape[2] != 3 or 0 in pixels.shape[1:]:
        raise ValueError(f"a rubric was given pixels {list(pixels.shape)}; expected [B, F, 3, H, W]")
    # The sum of a row is finite only if all of it is, and takes a pass without a mask as large as the pixels.
    rows = (~torch.isfinite(pixels.detach().sum((1, 2, 3, 4), dtype=torch.float32))).nonzero().flatten().tolist()
    if rows:
        some = [prompts[i] for i in rows[:3]]
        places = ", ".join(map(str, rows[:8])) + (", ..." if len(rows) > 8 else "")
        raise RewardError(
            f"the pixels of row {places} hold NaN or infinity (of {some}), so no reward was asked; "
            "a generator that makes such has diverged: lower its learning rate, or go back to an earlier checkpoint"
        )
    return pixels


def frames_as_samples(pixels: Tensor, facts: Sequence[Metadata]) -> tuple[Tensor, list[Metadata]]:
    """Each frame as a row by itself, frames of a row side by side; the fact `frame` says which it was."""
    alone = pixels.flatten(0, 1)[:, None]  # [B * F, 1, 3, H, W]
    return alone, [{**fact, "frame": k} for fact in facts for k in range(pixels.shape[1])]


def _learns(graded: WeightedReward) -> bool:
    return graded.spec.differentiable and graded.weight != 0


def _checked(
    name: str, graded: WeightedReward, pixels: Tensor, several: Sequence[Prompts], facts: Sequence[Metadata]
) -> list[Tensor]:
    """What the reward says of a chunk, or the sentence that says why it cannot be used."""
    try:
        values = score_prompts(graded.reward, pixels, several, facts)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        kind, some = type(error).__name__, list(several[0][:3])
        raise RewardError(f"reward '{name}' failed on {some} ({kind}: {error}); mend or remove it") from error
    return [_usable(name, graded, pixels, *asked) for asked in zip(several, values, strict=True)]


def _usable(name: str, graded: WeightedReward, pixels: Tensor, prompts: Prompts, value: object) -> Tensor:
    if not isinstance(value, Tensor) or value.shape != (len(pixels),):
        found = f"shape {list(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
        some = list(prompts[:3])
        raise RewardError(f"reward '{name}' returned {found} for {len(pixels)} rows {some}; expected one number a row")
    finite = torch.isfinite(value.detach())
    if not bool(finite.all()):
        bad = [prompts[i] for i in (~finite).nonzero().flatten().tolist()[:3]]
        raise RewardError(f"reward '{name}' returned NaN or infinity for {bad}; mend or remove it")
    if _learns(graded) and torch.is_grad_enabled() and pixels.requires_grad and not value.requires_grad:
        some = list(prompts[:3])
        raise RewardError(f"reward '{name}' says it is differentiable, but its scores of {some} carry no gradient")
    return value.float()
