from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal, Self

import torch
from torch import Tensor

from ..objective import Context, Objective
from ..pictures import fitted
from ..processes.autoregressive import Autoregressive
from ..randomness import Randomness
from ..types import Loss, Pictures, Segment, concatenate, index
from .advantages import by_group
from .forcing import Forced, disturbed, drawn, read, untold
from .surrogate import clipped


@dataclass(frozen=True)
class ForcedGRPO(Objective[Autoregressive, Pictures, Forced, None]):
    """GRPO with teacher forcing, as the trainer for LlamaGen has it; with noise and a prior, VA-pi.

    All samples of a picture read the same tokens, so one call of the network draws them all, and one scores them.
    Rewards find the picture in the fact `target`.
    """

    group: int = 8
    clip: float = 1e-4  # as published; VA-pi has 0.2
    kl: float = 0.0  # weight of Schulman's k3 to the reference
    prior: float = 0.0  # weight of the cross-entropy of the picture's own tokens, which holds the network in place
    noise: float = 0.0  # share of the tokens read that are replaced by any code
    limit: float = 5.0  # on advantages, either way
    unbiased: bool = True  # divide a group's spread by n - 1
    floor: float = 1e-8  # added to spreads
    faults: tuple[Literal["sampled_context", "dropout"], ...] = ()  # of the first trainer, to compare: both bend ratios
    needs: ClassVar[type] = Autoregressive
    needs_chance: ClassVar[bool] = True
    consumes: ClassVar[type] = Pictures

    def __post_init__(self) -> None:
        if self.group < 2:
            raise ValueError(f"'group' is {self.group}; expected at least 2 samples a picture to compare")
        if not (self.clip > 0 and self.kl >= 0 and self.prior >= 0 and self.limit > 0 and 0 <= self.noise <= 1):
            found = f"clip {self.clip}, kl {self.kl}, prior {self.prior}, limit {self.limit}, noise {self.noise}"
            raise ValueError(f"found {found}; expected positive numbers, kl and prior of at least 0, noise from 0 to 1")
        if "sampled_context" in self.faults and (self.prior or self.noise):
            raise ValueError("'faults' has sampled_context, which reads no picture; expected prior and noise to be 0")

    def kept_rows(self) -> int:
        return 1

    def samples(self) -> int:
        return self.group

    def calls(self, each: int) -> int:
        return 1  # all samples of a picture have the same context

    def snapshots(self) -> tuple[str, ...]:
        return ("reference",) if self.kl else ()

    def untied(self) -> Self | None:
        return replace(self, kl=0.0) if self.kl else None

    @torch.no_grad()
    def collect(self, ctx: Context[Autoregressive], batch: Pictures) -> Forced:
        few = max(1, (ctx.chunk or len(batch) * self.group) // self.group)
        chunks = torch.split(torch.arange(len(batch)), few)
        return concatenate([self._rated(ctx, index(batch, rows), index(ctx.rng, rows)) for rows in chunks])

    def _rated(self, ctx: Context[Autoregressive], batch: Pictures, rng: Randomness) -> Forced:
        policy, (_, _, height, width) = ctx.policy, ctx.policy.model.pixels
        pixels = fitted(batch.pixels.to(rng.rows.device), height, width)
        cond, clean = policy.embed(batch.prompts), policy.encode(pixels)
        context = disturbed(policy, cond, clean, rng, self.noise) if self.noise else clean
        scored = read(policy, cond, context)
        tokens = drawn(policy.process, scored, rng.uniform("token", self.group, clean.shape[1]))
        facts = [{"target": picture} for picture in pixels for _ in range(self.group)]
        scores = ctx.rubric.score(policy.decode(tokens.flatten(0, 1)), cond.repeat(self.group).prompts, facts)
        advantage = by_group(scores.total, self.group, self.unbiased, self.floor).clamp(-self.limit, self.limit)
        reward, better, *parts = (x.view(-1, self.group) for x in (scores.total, advantage, *scores.parts.values()))
        named = dict(zip(scores.parts, parts, strict=True))
        return Forced(cond, clean, context, tokens, scored.each(tokens), rng, reward, better, named)

    def watch(self, experience: Forced) -> dict[str, Tensor]:
        return experience.watched()

    def parts(self, experience: Forced) -> Sequence[None]:
        return (None,)

    def loss(self, ctx: Context[Autoregressive], experience: Forced, part: None) -> Loss:
        reference = None
        if self.kl:
            with ctx.policy.weights.use("reference"):
                reference, _ = self._scores(ctx, experience)
        log_prob, likelihood = self._scores(ctx, experience)
        ends, old = torch.ones(log_prob.shape[:1], device=log_prob.device), experience.log_prob.flatten(0, 1)
        tokens = experience.drawn.flatten(0, 1)
        segment = Segment(ends, 0 * ends, tokens, tokens, old, torch.ones_like(old))
        gain, watched = clipped(log_prob, segment, experience.advantage.flatten(), self.clip)
        if reference is not None:
            change = reference - log_prob
            away = change.expm1() - change
            gain, watched["kl"] = gain - self.kl * away, away.mean(1).detach()
        if self.prior:
            watched["likelihood"] = likelihood.detach()
        return Loss(-gain.mean(1).view(-1, self.group).mean(1) - self.prior * likelihood, watched)

    def _scores(self, ctx: Context[Autoregressive], seen: Forced) -> tuple[Tensor, Tensor]:
        """Log-probabilities of the drawn tokens [B * G, K], and of the picture's own in the mean [B]."""
        cond = seen.cond
        if "dropout" in self.faults and torch.is_grad_enabled():
            cond = untold(ctx.policy, cond, seen.rng, ctx.epoch)
        if "sampled_context" in self.faults:
            tokens = seen.drawn.flatten(0, 1)
            found = read(ctx.policy, cond.repeat(self.group), tokens).log_prob(tokens)
            return found, found.new_zeros(len(cond))
        scored = read(ctx.policy, cond, seen.context)
        both = scored.each(torch.cat([seen.drawn, seen.clean[:, None]], 1))  # at once, for there may be many logits
        return both[:, :-1].flatten(0, 1), both[:, -1].mean(1)
