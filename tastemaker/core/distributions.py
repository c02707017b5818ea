"""Distributions of actions and of clean samples. Log-probabilities and KL are per action: [B, K]."""

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

MAX_CHUNK_LOGITS = 2**24  # logits computed at a time by ChunkedCategorical: 64 MiB in float32


class Distribution(Protocol):
    """A distribution over a batch of actions."""

    @property
    def mean(self) -> Tensor: ...
    def sample(self, rng: Randomness, purpose: str, draw: int = 0) -> Tensor: ...
    def log_prob(self, value: Tensor) -> Tensor:
        """Log-probability of each action: [B, K]."""

    def kl(self, other: Distribution) -> Tensor:
        """KL(self || other) in closed form: [B, K]."""


def expand_dims_like(t: Tensor, x: Tensor) -> Tensor:
    """View t [B] so that it broadcasts over x [B, ...]."""
    return t.view(-1, *[1] * (x.ndim - 1))


def mean_per_sample(x: Tensor) -> Tensor:
    """Mean over every dimension but the first: [B, 1], one action per sample."""
    return x.flatten(1).mean(1, keepdim=True)


def squared_error(mean: Tensor, other: Distribution) -> Tensor:
    """Elementwise squared difference of the means of two Gaussians."""
    if isinstance(other, (Gaussian, SquaredErrorGaussian)):
        return (mean - other.mean) ** 2
    raise TypeError(
        f"KL: cannot compare a Gaussian with a {type(other).__name__}; pass two distributions of the same process "
        "[TM077]"
    )


@dataclass(frozen=True)
class Gaussian:
    """An isotropic Gaussian. Log-probabilities are means over elements, as in all published diffusion RL methods."""

    mean: Tensor  # [B, ...]
    std: Tensor  # [B]

    def sample(self, rng: Randomness, purpose: str, draw: int = 0) -> Tensor:
        return self.mean + expand_dims_like(self.std, self.mean) * rng.normal(purpose, *self.mean.shape[1:], draw=draw)

    def log_prob(self, value: Tensor) -> Tensor:
        std = expand_dims_like(self.std, self.mean)
        return mean_per_sample(-0.5 * ((value - self.mean) / std) ** 2 - std.log() - 0.5 * math.log(2 * math.pi))

    def kl(self, other: Distribution) -> Tensor:
        return mean_per_sample(squared_error(self.mean, other) / (2 * expand_dims_like(self.std, self.mean) ** 2))


@dataclass(frozen=True)
class SquaredErrorGaussian:
    """A Gaussian whose log-probability is minus the squared error, as in coefficient-preserving sampling."""

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
    """A distribution over tokens."""

    logits: Tensor  # [B, K, V]

    @property
    def mean(self) -> Tensor:
        return self.logits.softmax(-1)

    def sample(self, rng: Randomness, purpose: str, draw: int = 0) -> Tensor:
        return self.quantile(rng.uniform(purpose, self.logits.shape[1], draw=draw))

    def quantile(self, uniform: Tensor) -> Tensor:
        """The token at which the cumulative probability passes `uniform` in [0, 1): [B, K]."""
        cumulative = self.logits.float().softmax(-1).cumsum(-1)
        target = (uniform * cumulative[..., -1])[..., None]
        # right=True never returns a token of probability zero.
        return torch.searchsorted(cumulative, target, right=True).squeeze(-1).clamp(max=self.logits.shape[-1] - 1)

    def log_prob(self, value: Tensor) -> Tensor:
        return self.logits.gather(-1, value[..., None]).squeeze(-1) - self.logits.logsumexp(-1)

    def log_probs(self, tokens: Tensor) -> Tensor:
        """Log-probabilities of G tokens at every position: [B, G, K] of [B, G, K]."""
        log_probs = self.logits.gather(-1, tokens.transpose(1, 2)) - self.logits.logsumexp(-1, keepdim=True)
        return log_probs.transpose(1, 2)

    def entropy(self) -> Tensor:
        """Entropy of each token's distribution: [B, K]."""
        log_probs = self.logits.log_softmax(-1)
        return -(log_probs.exp() * log_probs).sum(-1)

    def kl(self, other: Distribution) -> Tensor:
        if not isinstance(other, Categorical):
            raise TypeError(
                f"KL: cannot compare a Categorical with a {type(other).__name__}; pass two distributions of the "
                "same process [TM078]"
            )
        p, q = self.logits.log_softmax(-1), other.logits.log_softmax(-1)
        return (p.exp() * (p - q)).sum(-1)


def top_k_top_p_filter(logits: Tensor, k: int, p: float) -> Tensor:
    """Keep the k most likely tokens (with ties), and of those the fewest that sum to probability p: [..., V]."""
    if 0 < k < logits.shape[-1]:
        logits = logits.masked_fill(logits < logits.topk(k, sorted=False).values.amin(-1, keepdim=True), -torch.inf)
    if p < 1:
        sorted_logits, indices = logits.sort(descending=True)
        before = sorted_logits.softmax(-1).cumsum(-1).roll(1, -1)  # probability of all tokens that are more likely
        before[..., 0] = 0  # so that at least one token is kept
        drop = torch.zeros_like(before, dtype=torch.bool).scatter(-1, indices, before > p)
        logits = logits.masked_fill(drop, -torch.inf)
    return logits


@dataclass(frozen=True)
class TokenSampler:
    """Temperature, top-k and top-p sampling."""

    temperature: float = 1.0
    top_k: int = 0  # 0 keeps all
    top_p: float = 1.0

    def distribution(self, logits: Tensor) -> Categorical:
        """The distribution that tokens are sampled from: [B, K, V]."""
        return Categorical(top_k_top_p_filter(logits.float() / self.temperature, self.top_k, self.top_p))

    def sample(self, logits: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor]:
        """Tokens for uniform numbers [B], and their log-probabilities before top-k and top-p: [B] each."""
        token = self.distribution(logits[:, None]).quantile(uniform[:, None])
        return token[:, 0], Categorical(logits[:, None].float() / self.temperature).log_prob(token)[:, 0]


class ChunkedLogProb(torch.autograd.Function):
    """Log-probabilities of tokens [B, K, G]; logits are computed chunk by chunk, and again in the backward pass."""

    @staticmethod
    def forward(ctx: Any, states: Tensor, weight: Tensor, tokens: Tensor, temperature: float) -> Tensor:
        normalizers, log_probs = [], []
        for rows in rows_per_chunk(states, weight):
            logits = F.linear(states[rows], weight).float().div_(temperature)
            normalizers.append(logits.logsumexp(-1, keepdim=True))
            log_probs.append(logits.gather(-1, tokens[rows]).sub_(normalizers[-1]))
        ctx.temperature = temperature
        ctx.save_for_backward(states, weight, tokens, torch.cat(normalizers))
        return torch.cat(log_probs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None, None]:
        states, weight, tokens, normalizers = ctx.saved_tensors
        grad_states = torch.empty_like(states)
        grad_weight = torch.zeros_like(weight, dtype=torch.float32)
        for rows in rows_per_chunk(states, weight):
            logits = F.linear(states[rows], weight).float().div_(ctx.temperature)
            grad_log_prob = gradient[rows].float() / ctx.temperature
            # d log p(token) / d logits = [is the token] - p
            grad_logits = logits.sub_(normalizers[rows]).exp_().mul_(-grad_log_prob.sum(-1, keepdim=True))
            grad_logits = grad_logits.scatter_add_(-1, tokens[rows], grad_log_prob).to(states.dtype)
            torch.matmul(grad_logits, weight, out=grad_states[rows])
            grad_weight += grad_logits.flatten(0, 1).t() @ states[rows].flatten(0, 1)
        return grad_states, grad_weight.to(weight.dtype), None, None


def rows_per_chunk(states: Tensor, weight: Tensor) -> list[slice]:
    """Slices of the batch whose logits are computed together.

    Their size depends on the shapes only, because the rounding of a matrix product depends on its size.
    """
    step = max(1, MAX_CHUNK_LOGITS // (states.shape[1] * len(weight)))
    return [slice(i, i + step) for i in range(0, len(states), step)]


@dataclass(frozen=True)
class ChunkedCategorical:
    """A categorical distribution by hidden states and output matrix, for vocabularies whose logits are too large."""

    hidden_states: Tensor  # [B, K, D]
    weight: Tensor  # [V, D]
    temperature: float = 1.0

    @property
    def logits(self) -> Tensor:
        return F.linear(self.hidden_states, self.weight).float() / self.temperature

    @property
    def mean(self) -> Tensor:
        return self.logits.softmax(-1)

    def sample(self, rng: Randomness, purpose: str, draw: int = 0) -> Tensor:
        return Categorical(self.logits).sample(rng, purpose, draw)

    def log_prob(self, value: Tensor) -> Tensor:
        return self.log_probs(value[:, None])[:, 0]

    def log_probs(self, tokens: Tensor) -> Tensor:
        """Log-probabilities of G tokens at every position: [B, G, K] of [B, G, K]."""
        with torch.autocast(self.hidden_states.device.type, enabled=False):
            log_probs: Tensor = ChunkedLogProb.apply(  # type: ignore[no-untyped-call]
                self.hidden_states, self.weight, tokens.transpose(1, 2), self.temperature
            )
        return log_probs.transpose(1, 2)

    def entropy(self) -> Tensor:
        """Entropy of each token's distribution: [B, K]."""
        chunks = [self.hidden_states[rows] for rows in rows_per_chunk(self.hidden_states, self.weight)]
        with torch.autocast(self.hidden_states.device.type, enabled=False):
            parts = [ChunkedCategorical(states, self.weight, self.temperature) for states in chunks]
            return torch.cat([Categorical(part.logits).entropy() for part in parts])

    def kl(self, other: Distribution) -> Tensor:
        if not isinstance(other, ChunkedCategorical):
            raise TypeError(
                f"KL: cannot compare a ChunkedCategorical with a {type(other).__name__}; pass two distributions "
                "of the same process [TM079]"
            )

        def chunk_kl(states: Tensor, other_states: Tensor) -> Tensor:
            p = Categorical(ChunkedCategorical(states, self.weight, self.temperature).logits)
            q = Categorical(ChunkedCategorical(other_states, other.weight, other.temperature).logits)
            return p.kl(q)

        chunks = rows_per_chunk(self.hidden_states, self.weight)
        with torch.autocast(self.hidden_states.device.type, enabled=False):
            kl = [
                checkpoint(chunk_kl, self.hidden_states[r], other.hidden_states[r], use_reentrant=False) for r in chunks
            ]
        return torch.cat(kl)


TokenDistribution = Categorical | ChunkedCategorical
