"""DGPO: direct group preference optimization, DPO between the good and the bad half of a group (arXiv 2510.08425)."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import ClassVar, Literal, Self

import torch
from torch import Tensor

from ..core.group_selection import GroupFilter, PoolSelection
from ..core.objective import Context, Objective, require_settings
from ..core.randomness import Purpose
from ..core.types import Loss, PromptBatch
from ..processes.gaussian import GaussianProcess
from .denoising_likelihood import error_likelihood, predict_clean, velocity_distance, velocity_level
from .sample_groups import (
    Advantage,
    Combine,
    SampleGroups,
    collect_groups,
    draw_levels,
    find_level_problem,
    predict_reference,
)


@dataclass(frozen=True)
class DGPO(Objective[GaussianProcess, PromptBatch, SampleGroups, int]):
    """Bradley-Terry on whole groups: the advantages of a group sum to zero, so the partition function cancels.

    Works with deterministic samplers. A row of experience is a group, so minibatches and micro-batches count prompts.
    """

    group_size: int = 16
    beta: float = 100.0  # of the preference; 10 for PickScore, 2000 to 5000 with preference_reference: old
    preference_reference: Literal["reference", "old"] = "reference"  # whose errors the live ones are compared with
    kl_coef: float = 0.02  # weight of the squared distance to the reference's velocity
    clip_range: float = 0.01  # no gradient where exp(error of old - live) leaves 1 ± clip_range; 0: no clipping
    advantage: Advantage = "group"  # standard deviations of the group, or group_mean: of all samples
    combine: Combine = "rewards"  # what the weighted sum over rewards is taken of
    advantage_clip: float = 5.0
    num_timesteps: int = 4  # noise levels per update, the same for all samples
    timestep_pool: int = 7  # they are drawn from so many of the sampler's first levels, without replacement
    reference_guidance_scale: float = 1.0  # of the reference; the live network is always trained without guidance
    old_policy_decay_rate: float = 0.001  # EMA decay of the old policy: min(rate * step, max)
    old_policy_decay_max: float = 0.3
    sample_with_old_after: int = 200  # steps after which the old policy samples instead of the live one
    filter_groups: GroupFilter | None = None  # which groups train; all if not given
    keep: PoolSelection | None = None  # train on the best and worst of a larger pool (Sol-RL); needs an ODE sampler
    needs: ClassVar[type] = GaussianProcess
    consumes: ClassVar[type] = PromptBatch

    def __post_init__(self) -> None:
        if self.group_size < 2:
            raise ValueError(
                "'group_size': expected at least 2 samples per prompt, because the samples of a prompt are "
                f"compared with each other, got {self.group_size}; raise 'group_size' [TM1565]"
            )
        if self.keep is not None:
            self.keep.check_group_size(self.group_size)
        valid = self.beta > 0 and self.advantage_clip > 0 and min(self.kl_coef, self.clip_range) >= 0
        names, expected = "beta advantage_clip kl_coef clip_range", "beta and advantage_clip above 0, others at least 0"
        require_settings(self, names, valid, expected)
        levels = 1 <= self.num_timesteps <= self.timestep_pool
        require_settings(
            self, "num_timesteps timestep_pool", levels, "1 or more levels, and a pool of at least as many"
        )
        valid = self.reference_guidance_scale >= 1 and self.sample_with_old_after >= 0
        require_settings(self, "reference_guidance_scale sample_with_old_after", valid, "at least 1 and at least 0")

    def experience_per_prompt(self) -> int:
        return 1

    def samples_per_row(self) -> int:
        return self.group_size

    @property
    def needs_reference(self) -> bool:
        """Whether the loss uses the reference's predictions."""
        return self.kl_coef > 0 or self.preference_reference == "reference"

    def snapshots(self) -> tuple[str, ...]:
        return ("old", "reference") if self.needs_reference else ("old",)

    def without_kl(self) -> Self | None:
        return replace(self, kl_coef=0.0) if self.kl_coef else None

    def find_level_problem(self, process: GaussianProcess) -> str | None:
        """Why the levels cannot be drawn from this sampler's; None if they can."""
        return find_level_problem(process, self.num_timesteps, self.timestep_pool)

    def needs_log_probs(self) -> bool:
        return False

    def collect(self, ctx: Context[GaussianProcess], batch: PromptBatch) -> SampleGroups:
        with_old = ctx.rng.step >= self.sample_with_old_after
        with ctx.policy.weights.use("old") if with_old else nullcontext():
            settings = self.num_timesteps, self.advantage, self.combine, self.filter_groups, self.keep
            groups = collect_groups(ctx, batch, self.group_size, *settings)
        return replace(groups, advantage=groups.advantage.clamp(-self.advantage_clip, self.advantage_clip))

    def metrics(self, experience: SampleGroups) -> dict[str, Tensor]:
        return experience.metrics()

    def parts(self, experience: SampleGroups) -> Sequence[int]:
        return range(experience.num_levels)

    def loss(self, ctx: Context[GaussianProcess], experience: SampleGroups, part: int) -> Loss:
        """Mean over a group of sigmoid(S) A |v - (noise - x0)|^2 + kl_coef |v - v_ref|^2 at one noise level.

        The samples of a group share the noise, which is new at every level.
        """
        policy, process, clean = ctx.policy, ctx.policy.process, experience.samples.flatten(0, 1)
        pool = min(self.timestep_pool, process.num_steps)
        t = draw_levels(process, experience.rng, self.num_timesteps, pool, ctx.epoch)[part]
        noise = experience.rng.normal(Purpose.NOISE, 1, *clean.shape[1:], draw=ctx.epoch * self.num_timesteps + part)
        cond, noisy = experience.corrupt(policy, t, noise)
        old = None
        if self.clip_range or self.preference_reference == "old":
            with policy.weights.use("old"):
                old = predict_clean(policy, cond, noisy)
        reference = None
        if self.needs_reference:
            reference = predict_reference(policy, cond, noisy, self.reference_guidance_scale)
        prediction = predict_clean(policy, cond, noisy)
        level = velocity_level(process.path, noisy.t)
        rows, metrics = self.sample_losses(prediction, clean, level, reference, old, experience.advantage)
        return Loss(experience.weighted(rows.mean(1) / self.num_timesteps), metrics)

    def sample_losses(
        self,
        prediction: Tensor,
        clean: Tensor,
        level: Tensor,
        reference: Tensor | None,
        old: Tensor | None,
        advantage: Tensor,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss of each sample [P, G] from predicted clean samples [P * G, ...] at levels [P * G], and metrics.

        S = sum_i A_i beta (e_i - e_ref,i) / G without gradient, so that the gradient is that of -log sigmoid(-S) up to
        the factor G / beta. `old` is needed with clipping, and one of `old` and `reference` for the preference.
        """
        advantage = advantage.double()

        def errors(x: Tensor) -> Tensor:
            return -error_likelihood(x, clean, level, "uniform").view_as(advantage)

        compared = old if self.preference_reference == "old" else reference
        assert compared is not None
        error = errors(prediction)
        weight = torch.sigmoid((self.beta * advantage * (error.detach() - errors(compared))).mean(1, keepdim=True))
        metrics = {"group_weight": weight.flatten()}
        if self.clip_range and old is not None:
            ratio = (errors(old) - error.detach()).exp()
            above, below = ratio > 1 + self.clip_range, ratio < 1 - self.clip_range
            clipped = torch.where(advantage > 0, above, below)
            error = torch.where(clipped, error.detach(), error)
            metrics |= {"ratio": ratio, "clip_fraction": clipped.double()}
        rows = weight * advantage * error
        if self.kl_coef and reference is not None:
            kl = velocity_distance(prediction, reference, level).view_as(rows)
            rows, metrics["kl"] = rows + self.kl_coef * kl, kl.detach()
        return rows, metrics

    def after_update(self, ctx: Context[GaussianProcess]) -> None:
        decay = min(self.old_policy_decay_rate * ctx.rng.step, self.old_policy_decay_max)
        ctx.policy.weights.update_snapshot("old", decay)
