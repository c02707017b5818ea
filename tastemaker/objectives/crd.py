"""CRD: centered reward distillation, a regression of implicit to true rewards (arXiv 2603.14128)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal, Self

import torch
import torch.nn.functional as F
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

MIN_KL_COEF = 1e-4  # of the worst samples, if the KL term follows the reward


@dataclass(frozen=True)
class CRD(Objective[GaussianProcess, PromptBatch, SampleGroups, int]):
    """Fit the implicit reward (error under the old policy minus error under the live one) to the true reward.

    Both are centered within the group of a prompt, which removes the unknown normalizer. A row of experience is a
    group, so minibatches and micro-batches count prompts.
    """

    group_size: int = 24
    beta: float = 1.0  # scale of the implicit reward
    loss_type: Literal["mse", "bce"] = "mse"
    temperature: float = -1.0  # below 0: centers are means; above: means under softmax(±reward / temperature)
    adaptive: bool = True  # divide squared errors by absolute ones, so that all noise levels weigh alike
    kl_coef: float = 0.1  # weight of the squared distance to the reference's velocity
    reward_adaptive_kl: bool = True  # hold good samples closer to the reference than bad ones
    advantage: Advantage = "group_mean"  # standard deviations of all samples, or group: of the group
    combine: Combine = "rewards"  # what the weighted sum over rewards is taken of
    advantage_clip: float = 5.0  # advantages from minus to plus this become rewards from 0 to 1
    num_timesteps: int | None = None  # noise levels per update; all levels of timestep_fraction if not given
    timestep_fraction: float = 0.99  # share of the sampler's levels that train, from the noisiest on
    reference_guidance_scale: float = 1.0  # of the reference, 4.5 as published; the live network has no guidance
    old_policy_decay_start: float = 0.25  # EMA decay of the old policy: min(start + rate * step, max)
    old_policy_decay_rate: float = 0.005
    old_policy_decay_max: float = 0.999
    sampling_decay_delay: int = 75  # EMA decay of the sampling policy: 0 until this step, then min(rate * more, max)
    sampling_decay_rate: float = 0.0075
    sampling_decay_max: float = 0.999
    filter_groups: GroupFilter | None = None  # which groups train; all if not given
    keep: PoolSelection | None = None  # train on the best and worst of a larger pool (Sol-RL); needs an ODE sampler
    needs: ClassVar[type] = GaussianProcess
    consumes: ClassVar[type] = PromptBatch

    def __post_init__(self) -> None:
        if self.group_size < 2:
            raise ValueError(
                "'group_size': expected at least 2 samples per prompt, because the samples of a prompt are "
                f"compared with each other, got {self.group_size}; raise 'group_size' [TM1566]"
            )
        if self.keep is not None:
            self.keep.check_group_size(self.group_size)
        valid = min(self.beta, self.advantage_clip) > 0 and self.kl_coef >= 0 and self.temperature != 0
        expected = "beta and advantage_clip above 0, kl_coef of at least 0, and a temperature that is not 0"
        require_settings(self, "beta advantage_clip kl_coef temperature", valid, expected)
        levels = 0 < self.timestep_fraction <= 1 and (self.num_timesteps is None or self.num_timesteps >= 1)
        require_settings(
            self, "num_timesteps timestep_fraction", levels, "1 or more levels, and a share above 0 and at most 1"
        )
        rates = min(self.old_policy_decay_start, self.old_policy_decay_rate, self.sampling_decay_rate) >= 0
        highest = max(self.old_policy_decay_max, self.sampling_decay_max) <= 1
        names = (
            "old_policy_decay_start old_policy_decay_rate sampling_decay_rate old_policy_decay_max sampling_decay_max"
        )
        require_settings(self, names, rates and highest, "rates of at least 0, and decays of at most 1")
        require_settings(self, "reference_guidance_scale", self.reference_guidance_scale >= 1, "at least 1")

    def experience_per_prompt(self) -> int:
        return 1

    def samples_per_row(self) -> int:
        return self.group_size

    def snapshots(self) -> tuple[str, ...]:
        return ("old", "sampling", "reference") if self.kl_coef else ("old", "sampling")

    def without_kl(self) -> Self | None:
        return replace(self, kl_coef=0.0) if self.kl_coef else None

    def timestep_pool(self, process: GaussianProcess) -> int:
        """Number of levels that train, from the noisiest on."""
        return max(1, int(self.timestep_fraction * process.num_steps))

    def find_level_problem(self, process: GaussianProcess) -> str | None:
        """Why the levels cannot be drawn from this sampler's; None if they can."""
        return find_level_problem(process, self.num_timesteps or 1, self.timestep_pool(process))

    def needs_log_probs(self) -> bool:
        return False

    def collect(self, ctx: Context[GaussianProcess], batch: PromptBatch) -> SampleGroups:
        num_levels = self.num_timesteps or self.timestep_pool(ctx.policy.process)
        with ctx.policy.weights.use("sampling"):
            settings = num_levels, self.advantage, self.combine, self.filter_groups, self.keep
            return collect_groups(ctx, batch, self.group_size, *settings)

    def metrics(self, experience: SampleGroups) -> dict[str, Tensor]:
        return experience.metrics()

    def parts(self, experience: SampleGroups) -> Sequence[int]:
        return range(experience.num_levels)

    def loss(self, ctx: Context[GaussianProcess], experience: SampleGroups, part: int) -> Loss:
        """Mean over a group of the distance of implicit and true rewards, plus the KL term, at one noise level."""
        policy, process, clean = ctx.policy, ctx.policy.process, experience.samples.flatten(0, 1)
        count = experience.num_levels
        t = draw_levels(process, experience.rng, count, self.timestep_pool(process), ctx.epoch)[part]
        noise = experience.rng.normal(Purpose.NOISE, *experience.samples.shape[1:], draw=ctx.epoch * count + part)
        cond, noisy = experience.corrupt(policy, t, noise)
        with policy.weights.use("old"):
            old = predict_clean(policy, cond, noisy)
        reference = None
        if self.kl_coef:
            reference = predict_reference(policy, cond, noisy, self.reference_guidance_scale)
        prediction = predict_clean(policy, cond, noisy)
        level = velocity_level(process.path, noisy.t)
        rows, metrics = self.sample_losses(prediction, clean, level, reference, old, experience.advantage)
        return Loss(experience.weighted(rows.mean(1) / count), metrics)

    def sample_losses(
        self, prediction: Tensor, clean: Tensor, level: Tensor, reference: Tensor | None, old: Tensor, advantage: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss of each sample [P, G] from predicted clean samples [P * G, ...] at levels [P * G], and metrics.

        (clip / beta) (beta rho_c - R_c)^2 with rho and R minus their group means; R in [0, 1] is from the advantage.
        """
        kind: Literal["adaptive_v", "uniform"] = "adaptive_v" if self.adaptive else "uniform"

        def likelihood(x: Tensor) -> Tensor:
            return error_likelihood(x, clean, level, kind).view_as(advantage)

        implicit = likelihood(prediction) - likelihood(old)
        reward = (advantage.double() / (2 * self.advantage_clip) + 0.5).clamp(0, 1)
        rows = torch.stack([self._distance(implicit, reward, weights) for weights in self._weights(reward)]).mean(0)
        metrics = {"implicit_reward": implicit.detach()}
        if reference is not None:
            kl = velocity_distance(prediction, reference, level).view_as(rows)
            lowest = MIN_KL_COEF / self.kl_coef
            share = lowest + reward * (1 - lowest) if self.reward_adaptive_kl else 1.0
            rows, metrics["kl"] = rows + self.kl_coef * share * kl, kl.detach()
        return rows, metrics

    def _weights(self, reward: Tensor) -> Sequence[Tensor]:
        """Weights [P, G] of the group's means: equal ones, or toward good samples and, for a second loss, bad ones."""
        if self.temperature < 0:
            return (torch.full_like(reward, 1 / reward.shape[1]),)
        return (reward / self.temperature).softmax(1), (-reward / self.temperature).softmax(1)

    def _distance(self, implicit: Tensor, reward: Tensor, weights: Tensor) -> Tensor:
        """Distance of the centered rewards of each sample: [P, G]."""
        implicit = self.beta * (implicit - (weights * implicit).sum(1, keepdim=True).detach())
        reward = reward - (weights * reward).sum(1, keepdim=True)
        if self.loss_type == "bce":
            distance = F.binary_cross_entropy_with_logits(implicit, reward.sigmoid(), reduction="none")
        else:
            distance = (implicit - reward) ** 2
        return self.advantage_clip / self.beta * distance

    def after_update(self, ctx: Context[GaussianProcess]) -> None:
        step = ctx.rng.step
        old = min(self.old_policy_decay_start + self.old_policy_decay_rate * step, self.old_policy_decay_max)
        sampling = min(self.sampling_decay_rate * max(0, step - self.sampling_decay_delay), self.sampling_decay_max)
        ctx.policy.weights.update_snapshot("old", old)
        ctx.policy.weights.update_snapshot("sampling", sampling)
