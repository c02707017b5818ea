"""Distributions over decisions and over clean samples; every value is per decision, [B, K]."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from .randomness import Randomness

MAX_CHUNK_LOGITS = 2**24  # logits that are made at once where not all are: 64 MiB in float32


class Distribution(Protocol):
    @property
    def mean(self) -> Tensor: ...
    def sample(self, rng: Randomness, purpose: str, draw: int = 0) -> Tensor: ...
    def log_prob(self, value: Tensor) -> Tensor:
        """[B, K]"""

    def kl(self, other: Distribution) -> Tensor:
        """Of this from the other, exactly: [B, K]."""


def broadcast_to_shape(t: Tensor, x: Tensor) -> Tensor:
    """Shape [B] to broadcast over [B, ...]."""
    return t.view(-1, *[1] * (x.ndim - 1))


def mean_per_sample(x: Tensor) -> Tensor:
    """Mean over every dimension but the first, kept as [B, 1]: one decision per sample."""
    return x.flatten(1).mean(1, keepdim=True)


def squared_error(mean: Tensor, other: Distribution) -> Tensor:
    if isinstance(other, (Gaussian, SquaredErrorGaussian)):
        return (mean - other.mean) ** 2
    raise TypeError(f"no divergence between latents and {type(other).__name__}; both must come of one process")


@dataclass(frozen=True)
class Gaussian:
    """Log-probabilities are means over elements, as every published flow and diffusion method has them."""

    mean: Tensor  # [B, ...]
    std: Tensor  # [B]

    def sample(self, rng: Randomness, purpose: str, draw: int = 0) -> Tensor:
        return self.mean + broadcast_to_shape(self.std, self.mean) * rng.normal(
            purpose, *self.mean.shape[1:], draw=draw
        )

    def log_prob(self, value: Tensor) -> Tensor:
        std = broadcast_to_shape(self.std, self.mean)
        return mean_per_sample(-0.5 * ((value - self.mean) / std) ** 2 - std.log() - 0.5 * math.log(2 * math.pi))

    def kl(self, other: Distribution) -> Tensor:
        return mean_per_sample(squared_error(self.mean, other) / (2 * broadcast_to_shape(self.std, self.mean) ** 2))


@dataclass(frozen=True)
class SquaredErrorGaussian:
    """A Gaussian scored by its squared error alone, as coefficient-preserving sampling does."""

    mean: Tensor  # [B, ...]
    std: Tensor  # [B]

    def sample(self, rng: Randomness, purpose: str, draw: int = 0) -> Tensor:
        return Gaussian(self.mean, self.std).sample(rng, purpose, draw)

    def log_prob(self, value: Tensor) -> Tensor:
        return mean_per_sample(-((value - self.mean) ** 2))

    def kl(self, other: Distribution) -> Tensor:
        return mean_per_sample(squared_error(self.mean, other))


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

    def each(self, tokens: Tensor) -> Tensor:
        """Log-probabilities of several tokens for every decision: [B, G, K] of [B, G, K]."""
        found = self.logits.gather(-1, tokens.transpose(1, 2)) - self.logits.logsumexp(-1, keepdim=True)
        return found.transpose(1, 2)

    def kl(self, other: Distribution) -> Tensor:
        if not isinstance(other, Categorical):
            raise TypeError(f"no divergence between tokens and {type(other).__name__}; both must come of one process")
        p, q = self.logits.log_softmax(-1), other.logits.log_softmax(-1)
        return (p.exp() * (p - q)).sum(-1)


def top_k_top_p_filter(logits: Tensor, k: int, p: float) -> Tensor:
    """Leave the k likeliest tokens (ties kept), and of those the fewest that hold probability p: [..., V]."""
    if 0 < k < logits.shape[-1]:
        logits = logits.masked_fill(logits < logits.topk(k, sorted=False).values.amin(-1, keepdim=True), -torch.inf)
    if p < 1:
        ordered, places = logits.sort(descending=True)
        before = ordered.softmax(-1).cumsum(-1).roll(1, -1)
        before[..., 0] = 0  # the token that crosses p stays, so at least one does
        drop = torch.zeros_like(before, dtype=torch.bool).scatter(-1, places, before > p)
        logits = logits.masked_fill(drop, -torch.inf)
    return logits


@dataclass(frozen=True)
class TokenSampler:
    """How a token is drawn from logits: cooled, of the likeliest, of the fewest that hold a probability."""

    temperature: float = 1.0
    top_k: int = 0  # 0 keeps all
    top_p: float = 1.0

    def over(self, logits: Tensor) -> Categorical:
        """What is drawn from: [B, K, V]."""
        return Categorical(top_k_top_p_filter(logits.float() / self.temperature, self.top_k, self.top_p))

    def take(self, logits: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor]:
        """The tokens that uniform numbers [B] decide on, and their log-probabilities before any were left out: [B]."""
        token = self.over(logits[:, None]).quantile(uniform[:, None])
        return token[:, 0], Categorical(logits[:, None].float() / self.temperature).log_prob(token)[:, 0]


class ChunkedLogProb(torch.autograd.Function):
    """Log-probabilities of tokens [B, K, G], whose logits are made a few rows at a time, and again for the gradient."""

    @staticmethod
    def forward(ctx: Any, states: Tensor, weight: Tensor, tokens: Tensor, temperature: float) -> Tensor:
        totals, found = [], []
        for rows in rows_per_chunk(states, weight):
            logits = F.linear(states[rows], weight).float().div_(temperature)
            totals.append(logits.logsumexp(-1, keepdim=True))
            found.append(logits.gather(-1, tokens[rows]).sub_(totals[-1]))
        ctx.temperature = temperature
        ctx.save_for_backward(states, weight, tokens, torch.cat(totals))
        return torch.cat(found)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None, None]:
        states, weight, tokens, totals = ctx.saved_tensors
        towards_states = torch.empty_like(states)
        towards_weight = torch.zeros_like(weight, dtype=torch.float32)
        for rows in rows_per_chunk(states, weight):
            logits = F.linear(states[rows], weight).float().div_(ctx.temperature)
            each = gradient[rows].float() / ctx.temperature
            # d log p(token) / d logits = [is the token] - p
            slope = logits.sub_(totals[rows]).exp_().mul_(-each.sum(-1, keepdim=True))
            slope = slope.scatter_add_(-1, tokens[rows], each).to(states.dtype)
            torch.matmul(slope, weight, out=towards_states[rows])
            towards_weight += slope.flatten(0, 1).t() @ states[rows].flatten(0, 1)
        return towards_states, towards_weight.to(weight.dtype), None, None


def rows_per_chunk(states: Tensor, weight: Tensor) -> list[slice]:
    """Rows whose logits are made together: always so many, for a product's rounding depends on its size."""
    step = max(1, MAX_CHUNK_LOGITS // (states.shape[1] * len(weight)))
    return [slice(i, i + step) for i in range(0, len(states), step)]


@dataclass(frozen=True)
class ChunkedCategorical:
    """A categorical distribution by what its logits are made of; all of them never exist at once but when asked for."""

    states: Tensor  # [B, K, D]
    weight: Tensor  # [V, D]
    temperature: float = 1.0

    @property
    def logits(self) -> Tensor:
        return F.linear(self.states, self.weight).float() / self.temperature

    @property
    def mean(self) -> Tensor:
        return self.logits.softmax(-1)

    def sample(self, rng: Randomness, purpose: str, draw: int = 0) -> Tensor:
        return Categorical(self.logits).sample(rng, purpose, draw)

    def log_prob(self, value: Tensor) -> Tensor:
        return self.each(value[:, None])[:, 0]

    def each(self, tokens: Tensor) -> Tensor:
        """Log-probabilities of several tokens for every decision: [B, G, K] of [B, G, K]."""
        with torch.autocast(self.states.device.type, enabled=False):
            found: Tensor = ChunkedLogProb.apply(  # type: ignore[no-untyped-call]
                self.states, self.weight, tokens.transpose(1, 2), self.temperature
            )
        return found.transpose(1, 2)

    def kl(self, other: Distribution) -> Tensor:
        if not isinstance(other, ChunkedCategorical):
            raise TypeError(f"no divergence between tokens and {type(other).__name__}; both must come of one process")

        def between(own: Tensor, others: Tensor) -> Tensor:
            there = ChunkedCategorical(others, other.weight, other.temperature)
            return Categorical(ChunkedCategorical(own, self.weight, self.temperature).logits).kl(
                Categorical(there.logits)
            )

        parts = rows_per_chunk(self.states, self.weight)
        with torch.autocast(self.states.device.type, enabled=False):
            found = [checkpoint(between, self.states[r], other.states[r], use_reentrant=False) for r in parts]
        return torch.cat(found)


TokenDistribution = Categorical | ChunkedCategorical
