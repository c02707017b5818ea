"""Generators that write one token after the other."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from ..distributions import Categorical
from ..guidance import GuidedCausal
from ..policy import Backbone, CausalBackbone, Guidance, Process, Rollout
from ..randomness import Randomness
from ..types import Condition, Corrupted, Segment, index


def keep_top(logits: Tensor, k: int, p: float) -> Tensor:
    """Leave the k likeliest tokens (ties kept), and of those the fewest that hold probability p: [..., V]."""
    if 0 < k < logits.shape[-1]:
        logits = logits.masked_fill(logits < logits.topk(k).values[..., -1:], -torch.inf)
    if p < 1:
        ordered, places = logits.sort(descending=True)
        before = ordered.softmax(-1).cumsum(-1).roll(1, -1)
        before[..., 0] = 0  # the token that crosses p stays, so at least one does
        drop = torch.zeros_like(before, dtype=torch.bool).scatter(-1, places, before > p)
        logits = logits.masked_fill(drop, -torch.inf)
    return logits


@dataclass(frozen=True)
class Autoregressive(Process):
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

    def hidden(self, noisy: Corrupted) -> Tensor:
        return noisy.noise.sum(1).float()

    def guide(self, model: Backbone, guidance: Guidance) -> Backbone:
        return GuidedCausal(causal(model), guidance)

    def start(self, model: Backbone, cond: Condition, rng: Randomness) -> Writing:
        return Writing(self, causal(model), cond, rng)

    def over(self, logits: Tensor) -> Categorical:
        """The distribution tokens are drawn from: [B, K, V]."""
        return Categorical(keep_top(logits.float() / self.temperature, self.top_k, self.top_p))

    def scored(self, logits: Tensor) -> Categorical:
        """The distribution decisions are scored by: [B, K, V].

        It is not truncated, or a token outside the few likeliest of other weights would have no finite log-probability.
        """
        return Categorical(logits.float() / self.temperature)

    def decide(self, model: Backbone, cond: Condition, segment: Segment) -> Categorical:
        return self.scored(model.predict(segment.state, segment.t, cond))

    def corrupt(
        self, x: Tensor, rng: Randomness, t: Tensor | None = None, noise: Tensor | None = None, draw: int = 0
    ) -> Corrupted:
        everything = torch.ones_like(x, dtype=torch.bool)  # causality hides every token from itself
        return Corrupted(x, torch.ones(len(x), device=x.device), everything)

    def restore(self, model: Backbone, cond: Condition, noisy: Corrupted) -> Categorical:
        return Categorical(model.predict(noisy.x, noisy.t, cond).float())

    def likelihood(self, model: Backbone, cond: Condition, x: Tensor, noisy: Corrupted) -> Tensor:
        return self.restore(model, cond, noisy).log_prob(x).sum(1)


def causal(model: Backbone) -> CausalBackbone:
    if isinstance(model, CausalBackbone):
        return model
    raise TypeError(f"the autoregressive process needs a model with a cache, found {type(model).__name__}")


class Writing(Rollout):
    """A rollout from the first token to the last; unwritten tokens preview as the first of the codebook."""

    def __init__(self, process: Autoregressive, model: CausalBackbone, cond: Condition, rng: Randomness) -> None:
        self.process, self.model, self.cond, self.rng = process, model, cond, rng
        self.uniform = rng.uniform("token", *model.shape)  # [B, L], drawn at once: one number decides each token
        self.start = torch.zeros_like(self.uniform, dtype=torch.long)
        self.ids, self.log_prob = self.start.clone(), torch.zeros_like(self.uniform)
        self.cache: Any = model.begin(cond)
        self.segments: tuple[Segment, ...] = ()
        self.written, self.price = 0, 0

    @property
    def progress(self) -> float:
        return self.written / self.ids.shape[1]

    def step(self) -> None:
        i = self.written
        logits, self.cache = self.model.extend(self.ids[:, i - 1] if i else None, self.cache, self.cond)
        token = self.process.over(logits[:, None]).quantile(self.uniform[:, i : i + 1])
        self.ids[:, i : i + 1] = token
        self.log_prob[:, i : i + 1] = self.process.scored(logits[:, None]).log_prob(token)
        self.written, self.price = i + 1, self.price + len(self.ids) * self.model.passes
        if self.progress == 1:
            self._record()

    @torch.no_grad()
    def _record(self) -> None:
        ends = torch.ones_like(self.log_prob[:, 0])
        segment = Segment(ends, 0 * ends, self.ids, self.ids, self.log_prob, torch.ones_like(self.log_prob))
        if self.process.replay:
            self.price += len(self.ids) * self.model.passes
            log_prob = self.process.decide(self.model, self.cond, segment).log_prob(self.ids)
            segment = Segment(ends, 0 * ends, self.ids, self.ids, log_prob, torch.ones_like(log_prob))
        self.segments = (segment,)

    def preview(self) -> Tensor:
        return self.ids

    def select(self, rows: Tensor) -> None:
        self.start, self.ids, self.log_prob = index((self.start, self.ids, self.log_prob), rows)
        self.uniform, self.cache, self.cond, self.segments, self.rng = index(
            (self.uniform, self.cache, self.cond, self.segments, self.rng), rows
        )
