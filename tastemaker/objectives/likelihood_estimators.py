"""Estimates of a sample's likelihood from several corruptions, one network call each, on every process.

All likelihoods are per element of a sample (mean over latents, or sum over tokens divided by their number). The
estimate of a sample is the mean over its corruptions.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..core.guidance import without_guidance
from ..core.policy import Policy, Process
from ..core.randomness import Purpose, Randomness
from ..core.types import Condition, Corrupted
from ..processes.gaussian import GaussianProcess
from ..processes.masked import MaskedProcess
from .denoising_likelihood import LikelihoodKind, error_likelihood, predict_clean, velocity_level
from .timestep_sampling import Sharing, TimestepSampling, sample_timesteps, share_randomness


@dataclass(frozen=True)
class LikelihoodEstimate:
    """The likelihood of samples given one corruption and, on diffusion models, the prediction it comes from."""

    likelihood: Tensor  # [B] float64
    prediction: Tensor | None = None  # [B, ...] the predicted clean sample
    level: Tensor | None = None  # [B] of the straight path
    output_weight: Tensor | None = None  # [B] squared error of the network's output per squared error of the prediction


class LikelihoodEstimator(ABC):
    """The corruptions of a sample and its likelihood given each of them."""

    num_levels: int  # corruptions of a sample

    @abstractmethod
    def corrupt(self, policy: Policy[Process], x: Tensor, rng: Randomness, level: int) -> Corrupted:
        """Corruption number `level` of samples; the same whenever it is called within a training step."""

    @abstractmethod
    def estimate(self, policy: Policy[Process], cond: Condition, x: Tensor, noisy: Corrupted) -> LikelihoodEstimate:
        """Likelihood of samples given a corruption, with their condition and without guidance."""


@dataclass(frozen=True)
class DenoisingEstimator(LikelihoodEstimator):
    """Denoising errors at several noise levels of a diffusion or flow model."""

    process: GaussianProcess
    kind: LikelihoodKind
    ghuber_power: float
    num_levels: int
    timestep_sampling: TimestepSampling
    timestep_fraction: float
    timestep_shift: float
    timestep_sharing: Sharing
    noise_sharing: Sharing
    rows_per_prompt: int  # random rows of each prompt, which may be more than its samples

    def corrupt(self, policy: Policy[Process], x: Tensor, rng: Randomness, level: int) -> Corrupted:
        uniform = share_randomness(rng, self.timestep_sharing, self.rows_per_prompt).uniform(
            Purpose.TIMESTEP, self.num_levels
        )
        t = sample_timesteps(
            self.process, uniform, self.timestep_sampling, self.timestep_fraction, self.timestep_shift
        )[:, level]
        noise_rng = share_randomness(rng, self.noise_sharing, self.rows_per_prompt)
        return self.process.corrupt(x, rng, t, noise_rng.normal(Purpose.NOISE, *x.shape[1:], draw=level))

    def estimate(self, policy: Policy[Process], cond: Condition, x: Tensor, noisy: Corrupted) -> LikelihoodEstimate:
        gaussian = Policy(policy.model, self.process, policy.weights)
        prediction, level = predict_clean(gaussian, cond, noisy), velocity_level(self.process.path, noisy.t)
        likelihood = error_likelihood(prediction, x, level, self.kind, self.ghuber_power)
        return LikelihoodEstimate(likelihood, prediction, level, self.process.path.output_error_weight(noisy.t))


@dataclass(frozen=True)
class MaskedEstimator(LikelihoodEstimator):
    """The ELBO of a masked-token model from pairs of a random mask and its complement (ESPO).

    The number k of masked tokens is uniform on 0 ... L, and a mask's log-probabilities are weighted by (L + 1) / k. The
    mean over both masks of a pair scores every token once. Even corruptions are masks, odd ones their complements.
    """

    process: MaskedProcess
    num_draws: int
    timestep_sharing: Sharing  # of k
    noise_sharing: Sharing  # of the order in which tokens are masked
    rows_per_prompt: int  # random rows of each prompt, which may be more than its samples

    @property
    def num_levels(self) -> int:  # type: ignore[override]
        return 2 * self.num_draws

    def corrupt(self, policy: Policy[Process], x: Tensor, rng: Randomness, level: int) -> Corrupted:
        draw, length = level // 2, x.shape[1]
        count = self.count_masked(rng, length, draw)
        order = share_randomness(rng, self.noise_sharing, self.rows_per_prompt).uniform(Purpose.MASK, length, draw=draw)
        masked = order.argsort(1) < count[:, None]
        masked = ~masked if level % 2 else masked
        return self.process.corrupt(x, rng, masked.float().mean(1), masked)

    def count_masked(self, rng: Randomness, length: int, draw: int) -> Tensor:
        """How many tokens a draw masks, uniform on 0 ... L: [B].

        Independent counts are stratified over the samples of a prompt, shared ones over the draws of a sample.
        """
        independent = self.timestep_sharing == "independent"
        shared = share_randomness(rng, "group" if independent else self.timestep_sharing, self.rows_per_prompt)
        first = shared.uniform(Purpose.TIMESTEP, 1, draw=draw if independent else 0).flatten()
        offset = rng.rows % self.rows_per_prompt / self.rows_per_prompt if independent else draw / self.num_draws
        return ((first * (length + 1)).floor() + offset * (length + 1)).round() % (length + 1)

    def estimate(self, policy: Policy[Process], cond: Condition, x: Tensor, noisy: Corrupted) -> LikelihoodEstimate:
        process = replace(self.process, likelihood_weight="sum")
        total = process.likelihood(*without_guidance(policy.model, cond), x, noisy)
        return LikelihoodEstimate(masked_elbo(total, noisy.noise) / x.shape[1])


def masked_elbo(total: Tensor, masked: Tensor) -> Tensor:
    """The summed log-probabilities [B] of k masked tokens, times (L + 1) / k, or 0 if none is masked: [B] float64."""
    count = masked.sum(1)
    return torch.where(count > 0, total.double() * (masked.shape[1] + 1) / count.clamp(min=1), 0.0)


@dataclass(frozen=True)
class ExactEstimator(LikelihoodEstimator):
    """The exact likelihood of an autoregressive model: one call, nothing is random."""

    num_levels: int = 1

    def corrupt(self, policy: Policy[Process], x: Tensor, rng: Randomness, level: int) -> Corrupted:
        return policy.corrupt(x, rng)

    def estimate(self, policy: Policy[Process], cond: Condition, x: Tensor, noisy: Corrupted) -> LikelihoodEstimate:
        return LikelihoodEstimate(policy.likelihood(cond, x, noisy).double() / policy.process.count_hidden(noisy))
