"""Generators that reveal many tokens at a time under a mask (MaskGIT)."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import ClassVar, Literal, Self

import torch
from torch import Tensor

from ..distributions import Categorical
from ..guidance import Guided
from ..policy import Backbone, Guidance, Process, Rollout
from ..randomness import Randomness
from ..types import HIDDEN, Condition, Corrupted, Segment, index


@dataclass(frozen=True)
class Masked(Process):
    """Each step reveals the hidden tokens the network is surest of, with some chance.

    Which tokens are revealed is random too, but not part of the log-probability: the usual approximation.
    """

    steps: int = 8
    schedule: Literal["cosine", "linear", "power", "sigmoid"] = "cosine"
    exponent: float = 2.0  # of the power schedule
    temperature: float = 1.0  # of the choice what to reveal
    annealing: Literal["compounding", "linear"] = "compounding"  # Show-o multiplies by what is left, step after step
    chance: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not (1 <= self.steps <= 10_000 and self.temperature >= 0 and self.exponent > 0):
            found = f"steps {self.steps}, temperature {self.temperature}, exponent {self.exponent}"
            raise ValueError(f"found {found}; expected 1 to 10000 steps, temperature of at least 0, exponent above 0")

    def in_steps(self, steps: int) -> Self:
        return replace(self, steps=steps)

    def calls(self, shape: tuple[int, ...]) -> int:
        return self.steps

    def hidden(self, noisy: Corrupted) -> Tensor:
        return noisy.noise.sum(1).float()

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
        return Guided(model, guidance)

    def start(self, model: Backbone, cond: Condition, rng: Randomness) -> Revealing:
        return Revealing(self, model, cond, rng)

    def remask(self, sureness: Tensor, hidden: Tensor, uniform: Tensor, step: int) -> Tensor:
        """Which tokens stay hidden after a step, the least sure of them: [B, N] bool."""
        count = hidden.shape[1]
        wanted = (count * self.left(torch.tensor((step + 1) / self.steps, dtype=torch.float32))).floor()
        kept = torch.minimum(hidden.sum(1) - 1, wanted.to(hidden.device)).clamp(min=1).long()  # [B]
        gumbel = -(-uniform.clamp(min=1e-20).log()).clamp(min=1e-20).log()
        sureness = torch.where(hidden, sureness, torch.finfo(torch.float32).max)
        chosen = sureness.clamp(min=1e-20).log() + self.heat(step) * gumbel
        cut = chosen.sort(1).values.gather(1, kept[:, None])
        return chosen < cut

    def decide(self, model: Backbone, cond: Condition, segment: Segment) -> Categorical:
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
        return Corrupted(torch.where(hidden, HIDDEN, x), t, hidden)

    def restore(self, model: Backbone, cond: Condition, noisy: Corrupted) -> Categorical:
        return Categorical(model.predict(noisy.x, noisy.t, cond).float())

    def likelihood(self, model: Backbone, cond: Condition, x: Tensor, noisy: Corrupted) -> Tensor:
        return (self.restore(model, cond, noisy).log_prob(x) * noisy.noise).sum(1)


class Revealing(Rollout):
    """A rollout from an empty canvas, or from one some of whose tokens are known."""

    def __init__(self, process: Masked, model: Backbone, cond: Condition, rng: Randomness) -> None:
        self.process, self.model, self.cond, self.rng = process, model, cond, rng
        empty = torch.full((len(cond), *model.shape), HIDDEN, device=rng.rows.device)
        self.start = self.ids = self.guess = empty
        self.segments: tuple[Segment, ...] = ()
        self.taken, self.price = 0, 0

    @property
    def progress(self) -> float:
        return self.taken / self.process.steps

    def step(self) -> None:
        i, hidden = self.taken, self.ids == HIDDEN
        t = hidden.float().mean(1)
        there = Categorical(self.model.predict(self.ids, t, self.cond).float())
        self.guess = torch.where(hidden, there.sample(self.rng, "token", i), self.ids)
        log_prob = there.log_prob(self.guess)
        self.taken, self.price = i + 1, self.price + len(self.ids) * self.model.passes
        if self.progress == 1:
            stay = torch.zeros_like(hidden)  # the last guess is the sample, whole
        else:
            uniform = self.rng.uniform("reveal", hidden.shape[1], draw=i)
            stay = self.process.remask(log_prob.exp(), hidden, uniform, i)
        revealed = hidden & ~stay
        self.segments += (Segment(t, stay.float().mean(1), self.ids, self.guess, log_prob, revealed.float()),)
        self.ids = torch.where(stay, HIDDEN, self.guess)

    def preview(self) -> Tensor:
        return self.guess

    def select(self, rows: Tensor) -> None:
        self.start, self.ids, self.guess = index((self.start, self.ids, self.guess), rows)
        self.cond, self.segments, self.rng = index((self.cond, self.segments, self.rng), rows)
