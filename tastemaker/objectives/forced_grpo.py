from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal, Self

import torch
from torch import Tensor

from ..core.objective import Context, Objective
from ..core.randomness import Randomness
from ..core.types import ImageBatch, Loss, concatenate, select_rows
from ..data.image_io import resize_area
from ..processes.autoregressive import AutoregressiveProcess
from .advantages import group_advantages
from .ppo import clipped_surrogate
from .reconstruction_reward import reconstruction_rewards
from .teacher_forcing import TeacherForcedSamples, compute_log_probs, sample_around
from .token_noise import LLAMAGEN_PROMPT_DROPOUT, drop_prompts, replace_tokens_randomly, sample_token_mask


@dataclass(frozen=True)
class TeacherForcedGRPO(Objective[AutoregressiveProcess, ImageBatch, TeacherForcedSamples, None]):
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
    needs: ClassVar[type] = AutoregressiveProcess
    needs_chance: ClassVar[bool] = True
    consumes: ClassVar[type] = ImageBatch

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
    def collect(self, ctx: Context[AutoregressiveProcess], batch: ImageBatch) -> TeacherForcedSamples:
        few = max(1, (ctx.chunk or len(batch) * self.group) // self.group)
        chunks = torch.split(torch.arange(len(batch)), few)
        return concatenate([self._rated(ctx, select_rows(batch, rows), select_rows(ctx.rng, rows)) for rows in chunks])

    def _rated(self, ctx: Context[AutoregressiveProcess], batch: ImageBatch, rng: Randomness) -> TeacherForcedSamples:
        policy, (_, _, height, width) = ctx.policy, ctx.policy.model.pixels
        pixels = resize_area(batch.pixels.to(rng.rows.device), height, width)
        told = batch.prompts if "dropout" in self.faults else drop_prompts(batch.prompts, rng, self.drop or 0)
        cond, clean = policy.embed(told), policy.encode(pixels)
        given = replace_tokens_randomly(policy, cond, clean, rng, self.noise) if self.noise else clean
        tokens, context, log_prob = sample_around(policy, cond, given, rng, self.group, self.own)
        reward, parts = reconstruction_rewards(ctx, batch, tokens, pixels, self.latent)
        better = group_advantages(reward.flatten(), self.group, self.unbiased, self.floor).clamp(
            -self.limit, self.limit
        )
        return TeacherForcedSamples(cond, clean, context, tokens, log_prob, rng, reward, better.view_as(reward), parts)

    def watch(self, experience: TeacherForcedSamples) -> dict[str, Tensor]:
        return experience.watched()

    def parts(self, experience: TeacherForcedSamples) -> Sequence[None]:
        return (None,)

    def loss(self, ctx: Context[AutoregressiveProcess], experience: TeacherForcedSamples, part: None) -> Loss:
        reference = None
        if self.kl:
            with ctx.policy.weights.use("reference"):
                reference, _ = self._scores(ctx, experience)
        log_prob, likelihood = self._scores(ctx, experience)
        segment = experience.segment(sample_token_mask(experience.rng, experience.drawn, self.skip, ctx.epoch))
        gain, watched = clipped_surrogate(log_prob, segment, experience.advantage.flatten(), self.clip, self.rise)
        if reference is not None:
            change = reference - log_prob
            away = change.expm1() - change
            gain, watched["kl"] = gain - self.kl * away, away.mean(1).detach()
        if self.prior:
            watched["likelihood"] = likelihood.detach()
        each = (gain * segment.mask).sum(1) / segment.mask.sum(1)
        return Loss(-each.view(-1, self.group).mean(1) - self.prior * likelihood, watched)

    def _scores(self, ctx: Context[AutoregressiveProcess], seen: TeacherForcedSamples) -> tuple[Tensor, Tensor]:
        """Log-probabilities of the drawn tokens [B * G, K], and of the picture's own in the mean [B]."""
        cond = seen.cond
        if "dropout" in self.faults and torch.is_grad_enabled():
            share = LLAMAGEN_PROMPT_DROPOUT if self.drop is None else self.drop
            cond = ctx.policy.embed(drop_prompts(cond.prompts, seen.rng, share, ctx.epoch), cond.facts)
        context = seen.drawn if "sampled_context" in self.faults else seen.context
        found, likelihood = compute_log_probs(ctx.policy, cond, context, seen.drawn, seen.clean)
        return found.flatten(0, 1), likelihood
