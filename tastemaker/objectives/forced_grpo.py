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
from ..types import Loss, Pictures, concatenate, index
from .advantages import by_group
from .chances import UNTOLD, counted, disturbed, untold
from .forcing import Forced, sampled, scores
from .likeness import earned
from .surrogate import clipped


@dataclass(frozen=True)
class ForcedGRPO(Objective[Autoregressive, Pictures, Forced, None]):
    """GRPO with teacher forcing, as the trainer for LlamaGen has it; with noise and a prior, VA-pi.

    All samples of a picture read the same tokens, so one call of the network draws them all, and one scores them;
    unless each reads some of its own. Rewards find the picture in the fact `target`.
    """

    group: int = 8
    clip: float = 1e-4  # as published; VA-pi has 0.2
    rise: float | None = None  # how far ratios may rise above 1, if not by clip too
    kl: float = 0.0  # weight of Schulman's k3 to the reference
    prior: float = 0.0  # weight of the cross-entropy of the picture's own tokens, which holds the network in place
    noise: float = 0.0  # share of the tokens read that are replaced by any code
    own: float = 0.0  # share of them that are the sample's own, which is then written one after the other
    skip: float = 0.0  # share of a sample's tokens that are left out of its loss, others each time
    drop: float | None = None  # share of conditions left out; not given none, but a tenth with the fault dropout
    latent: float = 0.0  # weight of the cosine of tokens' vectors to the picture's before it had tokens
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
        bounds, weights = (self.clip, self.rise or self.clip, self.limit), (self.kl, self.prior, self.latent)
        if not (min(bounds) > 0 and self.rise != 0 and min(weights) >= 0):
            found = f"clip {bounds[0]}, rise {self.rise}, limit {bounds[2]}; kl, prior and latent {weights}"
            raise ValueError(f"found {found}; expected the first three above 0, the others not below it")
        shares = (self.noise, self.own, self.drop or 0.0, self.skip)
        if not (min(shares) >= 0 and max(shares) <= 1 and self.skip < 1):
            found = f"noise {self.noise}, own {self.own}, drop {self.drop}, skip {self.skip}"
            raise ValueError(f"found {found}; expected shares from 0 to 1, skip below it")
        if "sampled_context" in self.faults and (self.prior or self.noise or self.own):
            raise ValueError("'faults' has sampled_context, which reads no picture; set prior, noise and own to 0")

    def kept_rows(self) -> int:
        return 1

    def samples(self) -> int:
        return self.group

    def calls(self, each: int) -> int:
        return self.group * each if self.own else 1  # all samples of a picture have the same context

    def gradients(self, decisions: int) -> int:
        return self.rows_at_once()

    def rows_at_once(self) -> int:
        return self.group if self.own or "sampled_context" in self.faults else 1

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
        told = batch.prompts if "dropout" in self.faults else untold(batch.prompts, rng, self.drop or 0)
        cond, clean = policy.embed(told), policy.encode(pixels)
        given = disturbed(policy, cond, clean, rng, self.noise) if self.noise else clean
        tokens, context, log_prob = sampled(policy, cond, given, rng, self.group, self.own)
        reward, parts = earned(ctx, batch, tokens, pixels, self.latent)
        better = by_group(reward.flatten(), self.group, self.unbiased, self.floor).clamp(-self.limit, self.limit)
        return Forced(cond, clean, context, tokens, log_prob, rng, reward, better.view_as(reward), parts)

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
        segment = experience.segment(counted(experience.rng, experience.drawn, self.skip, ctx.epoch))
        gain, watched = clipped(log_prob, segment, experience.advantage.flatten(), self.clip, self.rise)
        if reference is not None:
            change = reference - log_prob
            away = change.expm1() - change
            gain, watched["kl"] = gain - self.kl * away, away.mean(1).detach()
        if self.prior:
            watched["likelihood"] = likelihood.detach()
        each = (gain * segment.mask).sum(1) / segment.mask.sum(1)
        return Loss(-each.view(-1, self.group).mean(1) - self.prior * likelihood, watched)

    def _scores(self, ctx: Context[Autoregressive], seen: Forced) -> tuple[Tensor, Tensor]:
        """Log-probabilities of the drawn tokens [B * G, K], and of the picture's own in the mean [B]."""
        cond = seen.cond
        if "dropout" in self.faults and torch.is_grad_enabled():
            share = UNTOLD if self.drop is None else self.drop
            cond = ctx.policy.embed(untold(cond.prompts, seen.rng, share, ctx.epoch), cond.facts)
        context = seen.drawn if "sampled_context" in self.faults else seen.context
        found, likelihood = scores(ctx.policy, cond, context, seen.drawn, seen.clean)
        return found.flatten(0, 1), likelihood
