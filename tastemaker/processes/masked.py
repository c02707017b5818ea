"""Generators that reveal many tokens at a time under a mask (MaskGIT)."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import ClassVar, Literal, Protocol, Self, runtime_checkable

import torch
from torch import Tensor

from ..core.distributions import Categorical
from ..core.guidance import GuidedBackbone, count_forward_passes, scoring_model, unwrap_guidance, without_guidance
from ..core.policy import Backbone, Guidance, Process, Rollout
from ..core.randomness import Randomness
from ..core.types import MASK_TOKEN_ID, Condition, Corrupted, Segment, select_rows


class MaskedPredictor(Protocol):
    """Who predicts the pictures of some prompts, over and over."""

    def predict(self, x: Tensor, t: Tensor) -> Tensor:
        """Logits [B, N, V] of tokens [B, N], guided if so asked."""

    def select(self, rows: Tensor) -> MaskedPredictor:
        """Who goes on with some of the rows."""


@runtime_checkable
class SupportsPromptCache(Protocol):
    """A backbone that need not read a prompt again at every step, for no prompt sees its picture."""

    def reading(self, cond: Condition, guidance: Guidance | None) -> MaskedPredictor: ...


@runtime_checkable
class SupportsKnownTokens(Protocol):
    """A backbone whose condition may tell some of the tokens."""

    def canvas(self, cond: Condition) -> Tensor | None:
        """[B, N], hidden where nothing is told; none if nothing is at all."""


@runtime_checkable
class HasOwnLikelihood(Protocol):
    """A backbone that has a likelihood of its own."""

    def likelihood(self, x: Tensor, noisy: Corrupted, cond: Condition) -> Tensor | None:
        """[B]; none for that of the hidden tokens."""


@dataclass(frozen=True)
class MaskedProcess(Process):
    """Each step reveals the hidden tokens the network is surest of, with some chance.

    Which tokens are revealed is random too, but not part of the log-probability: the usual approximation.
    """

    steps: int = 8
    schedule: Literal["cosine", "linear", "power", "sigmoid"] = "cosine"
    exponent: float = 2.0  # of the power schedule
    temperature: float = 1.0  # of the choice what to reveal
    annealing: Literal["compounding", "linear"] = "compounding"  # Show-o multiplies by what is left, step after step
    # Record log-probs by calls that read everything, as those that will score them do, so that the first ratio is one.
    replay: bool = True
    # Of a likelihood: that of all hidden tokens, of one of them, or times all over hidden ones, which is 1/t: a bound.
    weight: Literal["sum", "mean", "bound"] = "sum"
    chance: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not (1 <= self.steps <= 10_000 and self.temperature >= 0 and self.exponent > 0):
            found = f"steps {self.steps}, temperature {self.temperature}, exponent {self.exponent}"
            raise ValueError(f"found {found}; expected 1 to 10000 steps, temperature of at least 0, exponent above 0")

    def as_sampled(self) -> Self:
        return replace(self, replay=False)

    def in_steps(self, steps: int) -> Self:
        return replace(self, steps=steps)

    def calls(self, shape: tuple[int, ...]) -> int:
        return self.steps

    def hidden(self, noisy: Corrupted) -> Tensor:
        """As many tokens as a likelihood is weighed for."""
        count = noisy.noise.sum(1).float()
        if self.weight == "sum":
            return count
        return torch.full_like(count, noisy.x.shape[1] if self.weight == "bound" else 1)

    def left(self, ratio: Tensor) -> Tensor:
        """The share hidden when `ratio` of the steps are done; float32, for cos(60 degrees) must round as published."""
        if self.schedule == "cosine":
            return torch.cos(ratio * math.pi / 2)
        if self.schedule == "linear":
            return (1 - ratio).clamp(min=1e-6)
        if self.schedule == "power":
            return (1 - ratio**self.exponent).clamp(min=1e-6)
        start, end = (torch.tensor(float(edge)).sigmoid() for edge in (-3, 3))
        return ((end - (ratio * 6 - 3).sigmoid()) / (end - start)).clamp(1e-6, 1.0)

    def heat(self, step: int) -> float:
        """The temperature of the choice at a step, from 0."""
        left = [1 - (j + 1) / self.steps for j in range(step + 1)]
        return self.temperature * (math.prod(left) if self.annealing == "compounding" else left[-1])

    def guide(self, model: Backbone, guidance: Guidance) -> Backbone:
        return GuidedBackbone(model, guidance)

    def start(self, model: Backbone, cond: Condition, rng: Randomness) -> MaskedRollout:
        return MaskedRollout(self, model, cond, rng)

    def remask(self, sureness: Tensor, hidden: Tensor, uniform: Tensor, step: int) -> Tensor:
        """Which tokens stay hidden after a step, the least sure of them: [B, N] bool."""
        count = hidden.shape[1]
        wanted = (count * self.left(torch.tensor((step + 1) / self.steps, dtype=torch.float32))).floor()
        kept = torch.minimum(hidden.sum(1) - 1, wanted.to(hidden.device)).clamp(min=1).long()  # [B]
        gumbel = -(-uniform.clamp(min=1e-20).log()).clamp(min=1e-20).log()
        sureness = torch.where(hidden, sureness, torch.finfo(torch.float32).max)
        chosen = sureness.clamp(min=1e-20).log() + self.heat(step) * gumbel
        cut = chosen.sort(1).values.gather(1, kept[:, None])
        return (chosen < cut) & hidden

    def decide(self, model: Backbone, cond: Condition, segment: Segment) -> Categorical:
        model, cond = scoring_model(model, cond)
        return Categorical(model.predict(segment.state, segment.t, cond).float())

    def hide(self, x: Tensor, t: Tensor, uniform: Tensor) -> Tensor:
        """Which tokens are hidden at level t, at least one: [B, N] bool."""
        count = (x.shape[1] * t).round().clamp(min=1)
        return uniform.argsort(1) < count[:, None]

    def corrupt(
        self, x: Tensor, rng: Randomness, t: Tensor | None = None, noise: Tensor | None = None, draw: int = 0
    ) -> Corrupted:
        t = self.left(rng.uniform("level", 1, draw=draw).flatten()) if t is None else t
        hidden = self.hide(x, t, rng.uniform("mask", x.shape[1], draw=draw)) if noise is None else noise
        return Corrupted(torch.where(hidden, MASK_TOKEN_ID, x), t, hidden)

    def restore(self, model: Backbone, cond: Condition, noisy: Corrupted) -> Categorical:
        model, cond = scoring_model(model, cond)
        return Categorical(model.predict(noisy.x, noisy.t, cond).float())

    def likelihood(self, model: Backbone, cond: Condition, x: Tensor, noisy: Corrupted) -> Tensor:
        model, cond = without_guidance(model, cond)
        total = model.likelihood(x, noisy, cond) if isinstance(model, HasOwnLikelihood) else None
        if total is None:
            total = (self.restore(model, cond, noisy).log_prob(x) * noisy.noise).sum(1)
        return total if self.weight == "sum" else total * self.hidden(noisy) / noisy.noise.sum(1)


class UncachedMaskedPredictor:
    """Reads everything at every step."""

    def __init__(self, model: Backbone, cond: Condition) -> None:
        self.model, self.cond = model, cond

    def predict(self, x: Tensor, t: Tensor) -> Tensor:
        return self.model.predict(x, t, self.cond)

    def select(self, rows: Tensor) -> Self:
        self.cond = select_rows(self.cond, rows)
        return self


def make_predictor(model: Backbone, cond: Condition, *, replay: bool) -> MaskedPredictor:
    """The backbone's own, where it has one that may round otherwise, and no gradient is wanted."""
    inner, guidance = unwrap_guidance(model)
    if isinstance(inner, SupportsPromptCache) and not replay and not torch.is_grad_enabled():
        return inner.reading(cond, guidance)
    return UncachedMaskedPredictor(model, cond)


def initial_tokens(model: Backbone, cond: Condition, device: torch.device) -> Tensor:
    """What is known beforehand, of most pictures nothing: [B, N]."""
    inner = unwrap_guidance(model)[0]
    known = inner.canvas(cond) if isinstance(inner, SupportsKnownTokens) else None
    return torch.full((len(cond), *model.shape), MASK_TOKEN_ID, device=device) if known is None else known


class MaskedRollout(Rollout):
    """A rollout from an empty canvas, or from one some of whose tokens are known."""

    def __init__(self, process: MaskedProcess, model: Backbone, cond: Condition, rng: Randomness) -> None:
        self.process, self.model, self.cond, self.rng = process, model, cond, rng
        self.start = self.ids = self.guess = initial_tokens(model, cond, rng.rows.device)
        self.reading = make_predictor(model, cond, replay=process.replay)
        self.segments: tuple[Segment, ...] = ()
        self.taken, self.price = 0, 0

    @property
    def progress(self) -> float:
        return self.taken / self.process.steps

    def step(self) -> None:
        i, hidden = self.taken, self.ids == MASK_TOKEN_ID
        t = hidden.float().mean(1)
        there = Categorical(self.reading.predict(self.ids, t).float())
        self.guess = torch.where(hidden, there.sample(self.rng, "token", i), self.ids)
        log_prob = there.log_prob(self.guess)
        self.taken, self.price = i + 1, self.price + len(self.ids) * count_forward_passes(self.model, t)
        if self.progress == 1:
            stay = torch.zeros_like(hidden)  # the last guess is the sample, whole
        else:
            uniform = self.rng.uniform("reveal", hidden.shape[1], draw=i)
            stay = self.process.remask(log_prob.exp(), hidden, uniform, i)
        revealed = hidden & ~stay
        segment = Segment(t, stay.float().mean(1), self.ids, self.guess, log_prob, revealed.float())
        self.segments += (self._scored(segment),)
        self.ids = torch.where(stay, MASK_TOKEN_ID, self.guess)

    def _scored(self, segment: Segment) -> Segment:
        """With the log-probabilities of the model itself, where rollouts alone are guided."""
        inner, guidance = unwrap_guidance(self.model)
        if not (self.process.replay and guidance and guidance.rollouts_only):
            return segment
        self.price += len(self.ids) * inner.passes
        there = self.process.decide(self.model, self.cond, segment)
        return replace(segment, log_prob=there.log_prob(segment.action))

    def preview(self) -> Tensor:
        return self.guess

    def select(self, rows: Tensor) -> None:
        self.start, self.ids, self.guess = select_rows((self.start, self.ids, self.guess), rows)
        self.cond, self.segments, self.rng = select_rows((self.cond, self.segments, self.rng), rows)
        self.reading = self.reading.select(rows)

    def redraw(self, rng: Randomness) -> None:
        self.rng = rng
