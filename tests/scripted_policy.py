"""A process with scripted log-probabilities, to compare objectives with recorded values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from tastemaker.core.distributions import Distribution
from tastemaker.core.policy import Backbone, Guidance, Policy, Process, Rollout
from tastemaker.core.randomness import Randomness
from tastemaker.core.types import Condition, Corrupted, Metadata, Prompts, Segment
from tastemaker.core.weights import FullWeights


@dataclass(frozen=True)
class FixedLogProb:
    """A distribution whose log-probability is fixed, whatever the value."""

    mean: Tensor  # [B, K]

    def sample(self, rng: Randomness, purpose: str, draw: int = 0) -> Tensor:
        raise NotImplementedError

    def log_prob(self, value: Tensor) -> Tensor:
        return self.mean

    def kl(self, other: Distribution) -> Tensor:
        raise NotImplementedError


class ScriptedNetwork(nn.Module):
    """Selects from [..., 2] the policy's log-probability or the reference's."""

    def __init__(self) -> None:
        super().__init__()
        self.coefficients = nn.Parameter(torch.tensor([0.0, 1.0]))

    def forward(self, values: Tensor) -> Tensor:
        return (values * self.coefficients).sum(-1)


class ScriptedModel(Backbone):
    shape, pixels, forward_passes = (1,), (1, 3, 1, 1), 1

    def __init__(self) -> None:
        self.net: nn.Module = ScriptedNetwork()

    def embed(self, prompts: Prompts, metadata: Sequence[Metadata] = ()) -> Condition:
        return Condition(tuple(prompts), {}, tuple(metadata))

    def predict(self, x: Tensor, t: Tensor, cond: Condition) -> Tensor:
        log_prob: Tensor = self.net(x)
        return log_prob

    def encode(self, pixels: Tensor) -> Tensor:
        return pixels

    def decode(self, x: Tensor, frames: Sequence[int] | None = None) -> Tensor:
        return x


@dataclass(frozen=True)
class ScriptedProcess(Process):
    stochastic: ClassVar[bool] = True

    def network_calls_per_sample(self, shape: tuple[int, ...]) -> int:
        return 1

    def count_hidden(self, noisy: Corrupted) -> Tensor:
        return torch.ones_like(noisy.t)

    def wrap_guidance(self, model: Backbone, guidance: Guidance) -> Backbone:
        return model

    def start(self, model: Backbone, cond: Condition, rng: Randomness) -> Rollout:
        raise NotImplementedError

    def action_distribution(self, model: Backbone, cond: Condition, segment: Segment) -> FixedLogProb:
        return FixedLogProb(model.predict(segment.state, segment.t, cond))

    def corrupt(
        self, x: Tensor, rng: Randomness, t: Tensor | None = None, noise: Tensor | None = None, draw: int = 0
    ) -> Corrupted:
        return Corrupted(x, torch.ones(len(x)), x)

    def restore(self, model: Backbone, cond: Condition, noisy: Corrupted) -> FixedLogProb:
        raise NotImplementedError

    def likelihood(self, model: Backbone, cond: Condition, x: Tensor, noisy: Corrupted) -> Tensor:
        return model.predict(noisy.x, noisy.t, cond)


def scripted_policy() -> Policy[Any]:
    """A policy whose log-probability is the first input, and whose reference's is the second."""
    model = ScriptedModel()
    weights = FullWeights(model.net, ("reference",))
    with torch.no_grad():
        model.net.coefficients.copy_(torch.tensor([1.0, 0.0]))
    return Policy(model, ScriptedProcess(), weights)
