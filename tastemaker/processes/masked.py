"""Masked-token generation (MaskGIT, Show-o): many tokens are predicted at a time, the most confident ones kept."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import ClassVar, Literal, Self

import torch
from torch import Tensor

from ..core.distributions import Categorical
from ..core.guidance import GuidedBackbone, count_forward_passes, scoring_model, without_guidance
from ..core.policy import Backbone, Guidance, MaskedPredictor, Process, Rollout
from ..core.randomness import Purpose, Randomness
from ..core.rollout_scope import ROLLOUTS
from ..core.types import MASK_TOKEN_ID, Condition, Corrupted, Segment, select_rows


@dataclass(frozen=True)
class MaskedProcess(Process):
    """Each step samples all masked tokens and reveals the most confident ones, with Gumbel noise.

    Which tokens are revealed is random too, but not part of the log-probability: the usual approximation.
    """

    num_steps: int = 8
    schedule: Literal["cosine", "linear", "power", "sigmoid"] = "cosine"
    exponent: float = 2.0  # of the power schedule
    temperature: float = 1.0  # of the Gumbel noise on confidences
    annealing: Literal["compounding", "linear"] = "compounding"  # of the temperature; compounding as in Show-o
    # Record log-probs with full calls, as the training step does, so that the first probability ratio is exactly 1.
    recompute_log_probs: bool = True
    # Of the log-likelihood: sum or mean over masked tokens, or the mean times all tokens (weight 1/t), the ELBO.
    likelihood_weight: Literal["sum", "mean", "elbo"] = "sum"
    stochastic: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not (1 <= self.num_steps <= 10_000 and self.temperature >= 0 and self.exponent > 0):
            raise ValueError(
                "expected 1 to 10000 steps, temperature of at least 0 and exponent above 0, got num_steps "
                f"{self.num_steps}, temperature {self.temperature}, exponent {self.exponent}; correct these "
                "settings [TM333]"
            )

    def with_sampled_log_probs(self) -> Self:
        return replace(self, recompute_log_probs=False)

    def without_temperature(self) -> Self:
        return replace(self, temperature=0.0)

    def with_num_steps(self, num_steps: int) -> Self:
        return replace(self, num_steps=num_steps)

    def network_calls_per_sample(self, shape: tuple[int, ...]) -> int:
        return self.num_steps

    def count_hidden(self, noisy: Corrupted) -> Tensor:
        """The number of tokens that a log-likelihood is summed over, by `likelihood_weight`: [B]."""
        count = noisy.noise.sum(1).float()
        if self.likelihood_weight == "sum":
            return count
        return torch.full_like(count, noisy.x.shape[1] if self.likelihood_weight == "elbo" else 1)

    def mask_ratio(self, ratio: Tensor) -> Tensor:
        """Share of tokens that are masked when `ratio` of the steps are done. In float32, to round as published."""
        if self.schedule == "cosine":
            return torch.cos(ratio * math.pi / 2)
        if self.schedule == "linear":
            return (1 - ratio).clamp(min=1e-6)
        if self.schedule == "power":
            return (1 - ratio**self.exponent).clamp(min=1e-6)
        start, end = (torch.tensor(float(edge)).sigmoid() for edge in (-3, 3))
        return ((end - (ratio * 6 - 3).sigmoid()) / (end - start)).clamp(1e-6, 1.0)

    def annealed_temperature(self, step: int) -> float:
        """The temperature at a step, from 0."""
        remaining = [1 - (j + 1) / self.num_steps for j in range(step + 1)]
        return self.temperature * (math.prod(remaining) if self.annealing == "compounding" else remaining[-1])

    def wrap_guidance(self, model: Backbone, guidance: Guidance) -> Backbone:
        return GuidedBackbone(model, guidance)

    def start(self, model: Backbone, cond: Condition, rng: Randomness) -> MaskedRollout:
        return MaskedRollout(self, model, cond, rng)

    def remask(self, confidence: Tensor, masked: Tensor, uniform: Tensor, step: int) -> Tensor:
        """Which tokens stay masked after a step, those of the lowest noisy confidence: [B, N] bool."""
        done = torch.tensor((step + 1) / self.num_steps, dtype=torch.float32)
        target = (masked.shape[1] * self.mask_ratio(done)).floor()
        num_masked = torch.minimum(masked.sum(1) - 1, target.to(masked.device)).clamp(min=1).long()  # [B]
        gumbel = -(-uniform.clamp(min=1e-20).log()).clamp(min=1e-20).log()
        confidence = torch.where(masked, confidence, torch.finfo(torch.float32).max)
        noisy_confidence = confidence.clamp(min=1e-20).log() + self.annealed_temperature(step) * gumbel
        threshold = noisy_confidence.sort(1).values.gather(1, num_masked[:, None])
        return (noisy_confidence < threshold) & masked

    def action_distribution(self, model: Backbone, cond: Condition, segment: Segment) -> Categorical:
        model, cond = scoring_model(model, cond)
        return Categorical(model.predict(segment.state, segment.t, cond).float())

    def mask_tokens(self, x: Tensor, t: Tensor, uniform: Tensor) -> Tensor:
        """Which tokens are masked at level t, at least one: [B, N] bool."""
        count = (x.shape[1] * t).round().clamp(min=1)
        return uniform.argsort(1) < count[:, None]

    def corrupt(
        self, x: Tensor, rng: Randomness, t: Tensor | None = None, noise: Tensor | None = None, draw: int = 0
    ) -> Corrupted:
        if t is None:
            t = self.mask_ratio(rng.uniform(Purpose.TIMESTEP, 1, draw=draw).flatten())
        if noise is None:
            noise = self.mask_tokens(x, t, rng.uniform(Purpose.MASK, x.shape[1], draw=draw))
        return Corrupted(torch.where(noise, MASK_TOKEN_ID, x), t, noise)

    def restore(self, model: Backbone, cond: Condition, noisy: Corrupted) -> Categorical:
        model, cond = scoring_model(model, cond)
        return Categorical(model.predict(noisy.x, noisy.t, cond).float())

    def likelihood(self, model: Backbone, cond: Condition, x: Tensor, noisy: Corrupted) -> Tensor:
        model, cond = without_guidance(model, cond)
        total = model.likelihood(x, noisy, cond)
        if total is None:
            total = (self.restore(model, cond, noisy).log_prob(x) * noisy.noise).sum(1)
        return total if self.likelihood_weight == "sum" else total * self.count_hidden(noisy) / noisy.noise.sum(1)


class UncachedMaskedPredictor:
    """Runs the whole network, prompts included, at every step."""

    def __init__(self, model: Backbone, cond: Condition) -> None:
        self.model, self.cond = model, cond

    def predict(self, x: Tensor, t: Tensor) -> Tensor:
        return self.model.predict(x, t, self.cond)

    def select(self, rows: Tensor) -> Self:
        self.cond = select_rows(self.cond, rows)
        return self


def make_predictor(model: Backbone, cond: Condition, *, exact: bool) -> MaskedPredictor:
    """The model's cached predictor, unless results must be `exact` to the last bit or gradients are needed."""
    cached = None if exact or torch.is_grad_enabled() else model.unguided.make_predictor(cond, model.guidance)
    return UncachedMaskedPredictor(model, cond) if cached is None else cached


def initial_tokens(model: Backbone, cond: Condition, device: torch.device) -> Tensor:
    """Masked tokens, except those that are known before sampling (inpainting): [B, N]."""
    known = model.unguided.known_tokens(cond)
    return torch.full((len(cond), *model.shape), MASK_TOKEN_ID, device=device) if known is None else known


class MaskedRollout(Rollout):
    """A rollout from masked tokens, or from tokens some of which are known."""

    def __init__(self, process: MaskedProcess, model: Backbone, cond: Condition, rng: Randomness) -> None:
        self.process, self.model, self.cond, self.rng = process, model, cond, rng
        self.start = self.ids = self.predicted_ids = initial_tokens(model, cond, rng.rows.device)
        self.predictor = make_predictor(model, cond, exact=process.recompute_log_probs)
        self.segments: tuple[Segment, ...] = ()
        self.steps_done, self.network_calls = 0, 0

    @property
    def progress(self) -> float:
        return self.steps_done / self.process.num_steps

    def step(self) -> None:
        i, masked = self.steps_done, self.ids == MASK_TOKEN_ID
        t = masked.float().mean(1)
        with ROLLOUTS.calls():
            distribution = Categorical(self.predictor.predict(self.ids, t).float())
        self.predicted_ids = torch.where(masked, distribution.sample(self.rng, Purpose.TOKEN, i), self.ids)
        log_prob = distribution.log_prob(self.predicted_ids)
        self.steps_done = i + 1
        self.network_calls += len(self.ids) * count_forward_passes(self.model, t)
        if self.progress == 1:
            still_masked = torch.zeros_like(masked)  # the last prediction is the sample
        else:
            uniform = self.rng.uniform(Purpose.REVEAL, masked.shape[1], draw=i)
            still_masked = self.process.remask(log_prob.exp(), masked, uniform, i)
        s, revealed = still_masked.float().mean(1), masked & ~still_masked
        segment = Segment(t, s, self.ids, self.predicted_ids, log_prob, revealed.float())
        self.segments += (self._with_unguided_log_prob(segment),)
        self.ids = torch.where(still_masked, MASK_TOKEN_ID, self.predicted_ids)

    def _with_unguided_log_prob(self, segment: Segment) -> Segment:
        """The segment with log-probs of the model without guidance, if only rollouts are guided."""
        guidance = self.model.guidance
        if not (self.process.recompute_log_probs and guidance and guidance.rollouts_only):
            return segment
        self.network_calls += len(self.ids) * self.model.unguided.forward_passes
        distribution = self.process.action_distribution(self.model, self.cond, segment)
        return replace(segment, log_prob=distribution.log_prob(segment.action))

    def preview(self) -> Tensor:
        return self.predicted_ids

    def select(self, rows: Tensor) -> None:
        self.start, self.ids, self.predicted_ids = select_rows((self.start, self.ids, self.predicted_ids), rows)
        self.cond, self.segments, self.rng = select_rows((self.cond, self.segments, self.rng), rows)
        self.predictor = self.predictor.select(rows)

    def reseed(self, rng: Randomness) -> None:
        self.rng = rng
