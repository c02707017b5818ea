"""Generators that write one token after the other."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from ..core.distributions import Categorical, ChunkedCategorical, TokenDistribution, TokenSampler, top_k_top_p_filter
from ..core.guidance import GuidedCausalBackbone, count_doubled_tokens, scoring_model, unwrap_guidance, without_guidance
from ..core.policy import (
    Backbone,
    CausalBackbone,
    Guidance,
    Process,
    Rollout,
    SupportsHiddenStates,
    SupportsTokenDecoder,
    TokenDecoder,
)
from ..core.randomness import Randomness
from ..core.types import Condition, Corrupted, Segment, select_rows

__all__ = ["AutoregressiveProcess", "top_k_top_p_filter"]


@dataclass(frozen=True)
class AutoregressiveProcess(Process):
    """Next-token generation; a whole sequence is one segment, since one causal call scores it."""

    temperature: float = 1.0
    top_k: int = 0  # 0 keeps all
    top_p: float = 1.0
    replay: bool = True  # record log-probs by the causal call that will score them, so that the first ratio is one
    drives: ClassVar[type] = CausalBackbone
    chance: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not (self.temperature > 0 and self.top_k >= 0 and 0 < self.top_p <= 1):
            found = f"temperature {self.temperature}, top_k {self.top_k}, top_p {self.top_p}"
            raise ValueError(f"found {found}; expected temperature above 0, top_k of at least 0 and top_p in (0, 1]")

    def as_sampled(self) -> Self:
        return replace(self, replay=False)

    def calls(self, shape: tuple[int, ...]) -> int:
        return shape[0]

    def decisions(self, shape: tuple[int, ...]) -> int:
        return 1  # a sequence is read whole

    def hidden(self, noisy: Corrupted) -> Tensor:
        return noisy.noise.sum(1).float()

    def guide(self, model: Backbone, guidance: Guidance) -> Backbone:
        return GuidedCausalBackbone(require_causal(model), guidance)

    def start(self, model: Backbone, cond: Condition, rng: Randomness) -> AutoregressiveRollout:
        return AutoregressiveRollout(self, require_causal(model), cond, rng)

    @property
    def choice(self) -> TokenSampler:
        return TokenSampler(self.temperature, self.top_k, self.top_p)

    def over(self, logits: Tensor) -> Categorical:
        """The distribution tokens are drawn from: [B, K, V]."""
        return self.choice.over(logits)

    def scored(self, logits: Tensor) -> Categorical:
        """The distribution decisions are scored by: [B, K, V].

        It is not truncated, or a token outside the few likeliest of other weights would have no finite log-probability.
        """
        return Categorical(logits.float() / self.temperature)

    def decide(self, model: Backbone, cond: Condition, segment: Segment) -> TokenDistribution:
        model, cond = scoring_model(model, cond)
        return predict_tokens(model, segment.state, segment.t, cond, self.temperature)

    def corrupt(
        self, x: Tensor, rng: Randomness, t: Tensor | None = None, noise: Tensor | None = None, draw: int = 0
    ) -> Corrupted:
        everything = torch.ones_like(x, dtype=torch.bool)  # causality hides every token from itself
        return Corrupted(x, torch.ones(len(x), device=x.device), everything)

    def restore(self, model: Backbone, cond: Condition, noisy: Corrupted) -> TokenDistribution:
        model, cond = scoring_model(model, cond)
        return predict_tokens(model, noisy.x, noisy.t, cond)

    def likelihood(self, model: Backbone, cond: Condition, x: Tensor, noisy: Corrupted) -> Tensor:
        return self.restore(*without_guidance(model, cond), noisy).log_prob(x).sum(1)


def predict_tokens(
    model: Backbone, x: Tensor, t: Tensor, cond: Condition, temperature: float = 1.0
) -> TokenDistribution:
    """What comes at each place [B, K]; where logits are many, they are only made when asked for, a few at a time."""
    parts = model.states(x, t, cond) if isinstance(model, SupportsHiddenStates) else None
    if parts is None:
        return Categorical(model.predict(x, t, cond).float() / temperature)
    return ChunkedCategorical(*parts, temperature)


def require_causal(model: Backbone) -> CausalBackbone:
    if isinstance(model, CausalBackbone):
        return model
    raise TypeError(f"the autoregressive process needs a model with a cache, found {type(model).__name__}")


class EagerDecoder:
    """Writes by any causal backbone, one call of it a token."""

    def __init__(self, model: CausalBackbone, cond: Condition, uniform: Tensor, choice: TokenSampler) -> None:
        self.model, self.cond, self.uniform, self.choice = model, cond, uniform, choice
        self.cache: Any = model.begin(cond)
        self._ids = torch.zeros_like(uniform, dtype=torch.long)
        self._log_prob, self.written = torch.zeros_like(uniform), 0
        self.last: Tensor | None = None  # what is read next

    @property
    def ids(self) -> Tensor:
        return self._ids.clone()

    @property
    def log_prob(self) -> Tensor:
        return self._log_prob.clone()

    def write(self) -> None:
        i = self.written
        logits, self.cache = self.model.extend(self.last, self.cache, self.cond)
        self.last, self._log_prob[:, i] = self.choice.take(logits, self.uniform[:, i])
        self._ids[:, i], self.written = self.last, i + 1

    def amend(self, ids: Tensor) -> None:
        self.last = ids

    def select(self, rows: Tensor) -> Self:
        self._ids, self._log_prob, self.uniform, self.cache, self.cond, self.last = select_rows(
            (self._ids, self._log_prob, self.uniform, self.cache, self.cond, self.last), rows
        )
        return self


def make_decoder(model: CausalBackbone, cond: Condition, uniform: Tensor, choice: TokenSampler) -> TokenDecoder:
    """The backbone's own, where it has one that can write now."""
    inner, guidance = unwrap_guidance(model)
    own = inner.scribe(cond, uniform, choice, guidance) if isinstance(inner, SupportsTokenDecoder) else None
    return own or EagerDecoder(model, cond, uniform, choice)


class AutoregressiveRollout(Rollout):
    """A rollout from the first token to the last; unwritten tokens preview as the first of the codebook."""

    def __init__(self, process: AutoregressiveProcess, model: CausalBackbone, cond: Condition, rng: Randomness) -> None:
        self.process, self.model, self.cond, self.rng = process, model, cond, rng
        uniform = rng.uniform("token", *model.shape)  # [B, L], drawn at once: one number decides each token
        self.scribe = make_decoder(model, cond, uniform, process.choice)
        self.start = torch.zeros_like(uniform, dtype=torch.long)
        self.segments: tuple[Segment, ...] = ()
        self.twice = count_doubled_tokens(model)
        self.written, self.price = 0, 0

    @property
    def progress(self) -> float:
        return self.written / self.start.shape[1]

    def step(self) -> None:
        self.scribe.write()
        reader = self.model if self.written < self.twice else unwrap_guidance(self.model)[0]
        self.written, self.price = self.written + 1, self.price + len(self.cond) * reader.passes
        if self.progress == 1:
            self._record()

    @torch.no_grad()
    def _record(self) -> None:
        ids, log_prob = self.scribe.ids, self.scribe.log_prob
        ends = torch.ones_like(log_prob[:, 0])
        segment = Segment(ends, 0 * ends, ids, ids, log_prob, torch.ones_like(log_prob))
        if self.process.replay:
            self.price += len(ids) * self.model.passes
            log_prob = self.process.decide(self.model, self.cond, segment).log_prob(ids)
            segment = Segment(ends, 0 * ends, ids, ids, log_prob, torch.ones_like(log_prob))
        self.segments = (segment,)

    def preview(self) -> Tensor:
        return self.segments[0].action if self.segments else self.scribe.ids

    def select(self, rows: Tensor) -> None:
        self.scribe = self.scribe.select(rows)
        self.start, self.cond, self.segments, self.rng = select_rows(
            (self.start, self.cond, self.segments, self.rng), rows
        )
