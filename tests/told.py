"""A process that says what it is told, so that objectives can be held against recorded log-probabilities."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from tastemaker.distributions import Distribution
from tastemaker.policy import Backbone, Guidance, Policy, Process, Rollout
from tastemaker.randomness import Randomness
from tastemaker.types import Condition, Corrupted, Facts, Prompts, Segment
from tastemaker.weights import FullWeights


@dataclass(frozen=True)
class Known:
    """Whatever the value, its log-probability is known."""

    mean: Tensor  # [B, K]

    def sample(self, rng: Randomness, purpose: str, draw: int = 0) -> Tensor:
        raise NotImplementedError

    def log_prob(self, value: Tensor) -> Tensor:
        return self.mean

    def kl(self, other: Distribution) -> Tensor:
        raise NotImplementedError


class Teller(nn.Module):
    """Reads [..., 2]: what to say now, and what the reference says."""

    def __init__(self) -> None:
        super().__init__()
        self.reading = nn.Parameter(torch.tensor([0.0, 1.0]))

    def forward(self, lines: Tensor) -> Tensor:
        return (lines * self.reading).sum(-1)


class Script:
    shape, pixels, passes = (1,), (1, 3, 1, 1), 1

    def __init__(self) -> None:
        self.net: nn.Module = Teller()

    def embed(self, prompts: Prompts, facts: Sequence[Facts] = ()) -> Condition:
        return Condition(tuple(prompts), {}, tuple(facts))

    def predict(self, x: Tensor, t: Tensor, cond: Condition) -> Tensor:
        said: Tensor = self.net(x)
        return said

    def encode(self, pixels: Tensor) -> Tensor:
        return pixels

    def decode(self, x: Tensor, frames: Sequence[int] | None = None) -> Tensor:
        return x


@dataclass(frozen=True)
class Told(Process):
    chance: ClassVar[bool] = True

    def calls(self, shape: tuple[int, ...]) -> int:
        return 1

    def hidden(self, noisy: Corrupted) -> Tensor:
        return torch.ones_like(noisy.t)

    def guide(self, model: Backbone, guidance: Guidance) -> Backbone:
        return model

    def start(self, model: Backbone, cond: Condition, rng: Randomness) -> Rollout:
        raise NotImplementedError

    def decide(self, model: Backbone, cond: Condition, segment: Segment) -> Known:
        return Known(model.predict(segment.state, segment.t, cond))

    def corrupt(
        self, x: Tensor, rng: Randomness, t: Tensor | None = None, noise: Tensor | None = None, draw: int = 0
    ) -> Corrupted:
        return Corrupted(x, torch.ones(len(x)), x)

    def restore(self, model: Backbone, cond: Condition, noisy: Corrupted) -> Known:
        raise NotImplementedError

    def likelihood(self, model: Backbone, cond: Condition, x: Tensor, noisy: Corrupted) -> Tensor:
        return model.predict(noisy.x, noisy.t, cond)


def teller() -> Policy[Any]:
    """A policy that says the first line now and the second as the reference."""
    model = Script()
    weights = FullWeights(model.net, ("reference",))
    with torch.no_grad():
        model.net.reading.copy_(torch.tensor([1.0, 0.0]))
    return Policy(model, Told(), weights)
