"""Autoregressive generation: one token after the other."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from ..core.distributions import Categorical, ChunkedCategorical, TokenDistribution, TokenSampler
from ..core.guidance import GuidedCausalBackbone, count_guided_tokens, scoring_model, without_guidance
from ..core.policy import Backbone, Guidance, Process, Rollout, TokenDecoder
from ..core.randomness import Purpose, Randomness
from ..core.rollout_scope import ROLLOUTS
from ..core.types import Condition, Corrupted, Segment, select_rows


@dataclass(frozen=True)
class AutoregressiveProcess(Process):
    """Next-token sampling. A whole sequence is one segment, because one causal call scores it."""

    temperature: float = 1.0
    top_k: int = 0  # 0 keeps all
    top_p: float = 1.0
    # Record log-probs with the causal call of the training step, so that the first probability ratio is exactly 1.
    recompute_log_probs: bool = True
    stochastic: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not (self.temperature > 0 and self.top_k >= 0 and 0 < self.top_p <= 1):
            raise ValueError(
                "expected temperature above 0, top_k of at least 0 and top_p above 0 and at most 1, got "
                f"temperature {self.temperature}, top_k {self.top_k}, top_p {self.top_p}; correct these settings "
                "[TM325]"
            )

    def with_sampled_log_probs(self) -> Self:
        return replace(self, recompute_log_probs=False)

    def network_calls_per_sample(self, shape: tuple[int, ...]) -> int:
        return shape[0]

    def calls_per_prediction(self, shape: tuple[int, ...]) -> int:
        return shape[0]  # one prediction scores a sequence, which takes one call per token to sample

    def count_hidden(self, noisy: Corrupted) -> Tensor:
        return noisy.noise.sum(1).float()

    def wrap_guidance(self, model: Backbone, guidance: Guidance) -> Backbone:
        return GuidedCausalBackbone(model, guidance)

    def start(self, model: Backbone, cond: Condition, rng: Randomness) -> AutoregressiveRollout:
        return AutoregressiveRollout(self, model, cond, rng)

    @property
    def sampler(self) -> TokenSampler:
        return TokenSampler(self.temperature, self.top_k, self.top_p)

    def action_distribution(self, model: Backbone, cond: Condition, segment: Segment) -> TokenDistribution:
        # Not truncated: a token outside the top-k of other weights would have a log-probability of minus infinity.
        model, cond = scoring_model(model, cond)
        return predict_tokens(model, segment.state, segment.t, cond, self.temperature)

    def corrupt(
        self, x: Tensor, rng: Randomness, t: Tensor | None = None, noise: Tensor | None = None, draw: int = 0
    ) -> Corrupted:
        hidden = torch.ones_like(x, dtype=torch.bool)  # causal attention hides every token from itself
        return Corrupted(x, torch.ones(len(x), device=x.device), hidden)

    def restore(self, model: Backbone, cond: Condition, noisy: Corrupted) -> TokenDistribution:
        model, cond = scoring_model(model, cond)
        return predict_tokens(model, noisy.x, noisy.t, cond)

    def likelihood(self, model: Backbone, cond: Condition, x: Tensor, noisy: Corrupted) -> Tensor:
        return self.restore(*without_guidance(model, cond), noisy).log_prob(x).sum(1)


def predict_tokens(
    model: Backbone, x: Tensor, t: Tensor, cond: Condition, temperature: float = 1.0
) -> TokenDistribution:
    """Distribution of each token of x [B, K]; if the logits are large, they are computed in chunks when needed."""
    hidden_states_and_head = model.hidden_states(x, t, cond)
    if hidden_states_and_head is None:
        return Categorical(model.predict(x, t, cond).float() / temperature)
    return ChunkedCategorical(*hidden_states_and_head, temperature)


class EagerDecoder:
    """Decodes with `Backbone.decode_step`, one network call per token."""

    low_precision = False

    def __init__(self, model: Backbone, cond: Condition, uniform: Tensor, sampler: TokenSampler) -> None:
        self.model, self.cond, self.uniform, self.sampler = model, cond, uniform, sampler
        self.cache: Any = model.init_cache(cond)
        self._ids = torch.zeros_like(uniform, dtype=torch.long)
        self._log_prob, self.num_decoded = torch.zeros_like(uniform), 0
        self.last_ids: Tensor | None = None  # input of the next call

    @property
    def ids(self) -> Tensor:
        return self._ids.clone()

    @property
    def log_prob(self) -> Tensor:
        return self._log_prob.clone()

    def decode_next(self) -> None:
        i = self.num_decoded
        logits, self.cache = self.model.decode_step(self.last_ids, self.cache, self.cond)
        self.last_ids, self._log_prob[:, i] = self.sampler.sample(logits, self.uniform[:, i])
        self._ids[:, i], self.num_decoded = self.last_ids, i + 1

    def replace_last(self, ids: Tensor) -> None:
        self.last_ids = ids

    def select(self, rows: Tensor) -> Self:
        self._ids, self._log_prob, self.uniform, self.cache, self.cond, self.last_ids = select_rows(
            (self._ids, self._log_prob, self.uniform, self.cache, self.cond, self.last_ids), rows
        )
        return self


def make_decoder(model: Backbone, cond: Condition, uniform: Tensor, sampler: TokenSampler) -> TokenDecoder:
    """The model's fast decoder if it has one for its current weights, otherwise an eager one."""
    fast = model.unguided.make_decoder(cond, uniform, sampler, model.guidance)
    return fast or EagerDecoder(model, cond, uniform, sampler)


class AutoregressiveRollout(Rollout):
    """A rollout from the first token to the last; tokens that are still missing are 0 in a preview."""

    def __init__(self, process: AutoregressiveProcess, model: Backbone, cond: Condition, rng: Randomness) -> None:
        self.process, self.model, self.cond, self.rng = process, model, cond, rng
        uniform = rng.uniform(Purpose.TOKEN, *model.shape)  # [B, L], one number per token, drawn in advance
        with ROLLOUTS.calls():
            self.decoder = make_decoder(model, cond, uniform, process.sampler)
        self.start = torch.zeros_like(uniform, dtype=torch.long)
        self.segments: tuple[Segment, ...] = ()
        self.num_guided_tokens = count_guided_tokens(model.guidance, model.shape[0])
        self.num_decoded, self.network_calls = 0, 0

    @property
    def progress(self) -> float:
        return self.num_decoded / self.start.shape[1]

    def step(self) -> None:
        self.decoder.decode_next()
        model = self.model if self.num_decoded < self.num_guided_tokens else self.model.unguided
        self.num_decoded += 1
        self.network_calls += len(self.cond) * model.forward_passes
        if self.progress == 1:
            self._record()

    @torch.no_grad()
    def _record(self) -> None:
        ids, log_prob = self.decoder.ids, self.decoder.log_prob
        t = torch.ones_like(log_prob[:, 0])
        segment = Segment(t, 0 * t, ids, ids, log_prob, torch.ones_like(log_prob))
        if self.process.recompute_log_probs:
            self.network_calls += len(ids) * self.model.forward_passes
            exact = self.process.action_distribution(self.model, self.cond, segment).log_prob(ids)
            segment = replace(segment, log_prob=exact)
            if self.decoder.low_precision:
                segment = replace(segment, precision_log_ratio=self._sampler_log_prob(segment) - log_prob)
        self.segments = (segment,)

    def _sampler_log_prob(self, segment: Segment) -> Tensor:
        """Log-probs of the sampler, with its guidance, in the training precision: [B, L]."""
        guidance = self.model.guidance
        if not (guidance and guidance.rollouts_only):
            return segment.log_prob
        self.network_calls += len(segment.t) * self.model.forward_passes
        distribution = predict_tokens(self.model, segment.state, segment.t, self.cond, self.process.temperature)
        return distribution.log_prob(segment.action)

    def preview(self) -> Tensor:
        return self.segments[0].action if self.segments else self.decoder.ids

    def select(self, rows: Tensor) -> None:
        self.decoder = self.decoder.select(rows)
        self.start, self.cond, self.segments, self.rng = select_rows(
            (self.start, self.cond, self.segments, self.rng), rows
        )
