"""Distributions over decisions and over clean samples; every value is per decision, [B, K]."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from .randomness import Randomness


class Distribution(Protocol):
    @property
    def mean(self) -> Tensor: ...
    def sample(self, rng: Randomness, purpose: str, draw: int = 0) -> Tensor: ...
    def log_prob(self, value: Tensor) -> Tensor:
        """[B, K]"""

    def kl(self, other: Distribution) -> Tensor:
        """Of this from the other, exactly: [B, K]."""


def like(t: Tensor, x: Tensor) -> Tensor:
    """Shape [B] to broadcast over [B, ...]."""
    return t.view(-1, *[1] * (x.ndim - 1))


def per_sample(x: Tensor) -> Tensor:
    """Mean over every dimension but the first, kept as [B, 1]: one decision per sample."""
    return x.flatten(1).mean(1, keepdim=True)


def squared(mean: Tensor, other: Distribution) -> Tensor:
    if isinstance(other, (Gaussian, Plain)):
        return (mean - other.mean) ** 2
    raise TypeError(f"no divergence between latents and {type(other).__name__}; both must come of one process")


@dataclass(frozen=True)
class Gaussian:
    """Log-probabilities are means over elements, as every published flow and diffusion method has them."""

    mean: Tensor  # [B, ...]
    std: Tensor  # [B]

    def sample(self, rng: Randomness, purpose: str, draw: int = 0) -> Tensor:
        return self.mean + like(self.std, self.mean) * rng.normal(purpose, *self.mean.shape[1:], draw=draw)

    def log_prob(self, value: Tensor) -> Tensor:
        std = like(self.std, self.mean)
        return per_sample(-0.5 * ((value - self.mean) / std) ** 2 - std.log() - 0.5 * math.log(2 * math.pi))

    def kl(self, other: Distribution) -> Tensor:
        return per_sample(squared(self.mean, other) / (2 * like(self.std, self.mean) ** 2))


@dataclass(frozen=True)
class Plain:
    """A Gaussian scored by its squared error alone, as coefficient-preserving sampling does."""

    mean: Tensor  # [B, ...]
    std: Tensor  # [B]

    def sample(self, rng: Randomness, purpose: str, draw: int = 0) -> Tensor:
        return Gaussian(self.mean, self.std).sample(rng, purpose, draw)

    def log_prob(self, value: Tensor) -> Tensor:
        return per_sample(-((value - self.mean) ** 2))

    def kl(self, other: Distribution) -> Tensor:
        return per_sample(squared(self.mean, other))


@dataclass(frozen=True)
class Categorical:
    logits: Tensor  # [B, K, V]

    @property
    def mean(self) -> Tensor:
        return self.logits.softmax(-1)

    def sample(self, rng: Randomness, purpose: str, draw: int = 0) -> Tensor:
        return self.quantile(rng.uniform(purpose, self.logits.shape[1], draw=draw))

    def quantile(self, uniform: Tensor) -> Tensor:
        """The token at which the cumulative probability passes `uniform`, which lies in [0, 1): [B, K]."""
        passed = self.logits.float().softmax(-1).cumsum(-1)
        target = (uniform * passed[..., -1])[..., None]
        # right=True never lands on a token of probability zero.
        return torch.searchsorted(passed, target, right=True).squeeze(-1).clamp(max=self.logits.shape[-1] - 1)

    def log_prob(self, value: Tensor) -> Tensor:
        return self.logits.gather(-1, value[..., None]).squeeze(-1) - self.logits.logsumexp(-1)

    def kl(self, other: Distribution) -> Tensor:
        if not isinstance(other, Categorical):
            raise TypeError(f"no divergence between tokens and {type(other).__name__}; both must come of one process")
        p, q = self.logits.log_softmax(-1), other.logits.log_softmax(-1)
        return (p.exp() * (p - q)).sum(-1)
