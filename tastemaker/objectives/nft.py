"""DiffusionNFT: negative-aware fine-tuning on the forward process (Zheng et al. 2025)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal, Self

import torch
from torch import Tensor

from ..core.group_selection import GroupFilter, PoolSelection
from ..core.objective import Context, Objective, ScoredRollout, require_settings, rollout_and_score
from ..core.randomness import Purpose, Randomness
from ..core.types import Loss, PromptBatch
from ..processes.gaussian import GaussianProcess
from .advantages import combine_advantages, filter_weights, group_mean_advantages
from .denoising_likelihood import norm_guard, velocity_level


@dataclass(frozen=True)
class NFT(Objective[GaussianProcess, PromptBatch, ScoredRollout, int]):
    """Fit positive samples with the policy, and negative ones with its reflection at the old policy.

    Predictions are affine in the clean sample, so the paper's mixtures of velocities are mixtures of clean samples.
    """

    group_size: int = 8
    beta: float = 1.0  # strength of the implicit positive and negative policies
    num_timesteps: int = 2  # noise levels per sample
    # Of the training distribution, or those that the sampler visits: a distilled model need not know any others.
    levels: Literal["random", "sampler"] = "random"
    advantage_clip: float = 5.0  # advantages are clipped to it; it also scales the loss
    kl_coef: float = 1e-4  # weight of the squared distance to the reference's prediction; small runs collapse without
    norm_guard_coef: float = 0.0  # weight of the squared excess of the velocity's norm over the reference's
    combine: Literal["rewards", "advantages"] = "rewards"  # what the weighted sum over rewards is taken of
    old_policy_decay_rate: float = 0.001  # EMA decay of the sampling policy: min(rate * step, max)
    old_policy_decay_max: float = 0.5
    filter_groups: GroupFilter | None = None  # which groups train; all if not given
    keep: PoolSelection | None = None  # train on the best and worst of a larger pool (Sol-RL); needs an ODE sampler
    needs: ClassVar[type] = GaussianProcess
    consumes: ClassVar[type] = PromptBatch

    def __post_init__(self) -> None:
        if self.group_size < 2:
            raise ValueError(
                "'group_size': expected at least 2 samples per prompt, because the samples of a prompt are "
                f"compared with each other, got {self.group_size}; raise 'group_size' [TM309]"
            )
        if self.keep is not None:
            self.keep.check_group_size(self.group_size)
        coefficients = self.kl_coef >= 0 and self.norm_guard_coef >= 0
        valid = self.beta > 0 and self.num_timesteps >= 1 and self.advantage_clip > 0 and coefficients
        expected = "kl_coef and norm_guard_coef of at least 0 and the other settings above 0"
        require_settings(self, "beta num_timesteps advantage_clip kl_coef norm_guard_coef", valid, expected)

    def snapshots(self) -> tuple[str, ...]:
        return ("old", "reference") if self.kl_coef or self.norm_guard_coef else ("old",)

    def without_kl(self) -> Self | None:
        return replace(self, kl_coef=0.0) if self.kl_coef else None

    def needs_log_probs(self) -> bool:
        return False

    def collect(self, ctx: Context[GaussianProcess], batch: PromptBatch) -> ScoredRollout:
        with ctx.policy.weights.use("old"):
            trajectory, rng, scores = rollout_and_score(ctx, batch, self.group_size, self.keep)

        def compute_advantages(reward: Tensor) -> Tensor:
            return group_mean_advantages(reward, self.group_size, ctx.comm.gather(reward))

        if self.combine == "advantages":
            advantage = combine_advantages(ctx.rubric, scores.rewards, compute_advantages)
        else:
            advantage = compute_advantages(scores.total)
        weight = filter_weights(ctx, scores.total, self.group_size, self.filter_groups)
        return ScoredRollout(trajectory, rng, scores.total, advantage, scores.rewards, weight, scores.pool)

    def metrics(self, experience: ScoredRollout) -> dict[str, Tensor]:
        return experience.metrics(self.group_size)

    def parts(self, experience: ScoredRollout) -> Sequence[int]:
        return range(self.num_timesteps)

    def loss(self, ctx: Context[GaussianProcess], experience: ScoredRollout, part: int) -> Loss:
        """r |x+ - x0|^2 + (1 - r) |x- - x0|^2 with x+- = old +- beta (policy - old), r from the advantage in [0, 1]."""
        policy, cond, clean = ctx.policy, experience.trajectory.cond, experience.trajectory.final
        draw = ctx.epoch * self.num_timesteps + part
        noisy = policy.corrupt(clean, experience.rng, self._levels(policy.process, experience.rng, draw), draw=draw)
        with policy.weights.use("old"):
            old = policy.restore(cond, noisy).mean
        reference = None
        if self.kl_coef or self.norm_guard_coef:
            with policy.weights.use("reference"):
                reference = policy.restore(cond, noisy).mean
        prediction = policy.restore(cond, noisy).mean
        positive_loss = normalized_squared_error(old + self.beta * (prediction - old), clean)
        negative_loss = normalized_squared_error(old - self.beta * (prediction - old), clean)
        positive_weight = (experience.advantage / (2 * self.advantage_clip) + 0.5).clamp(0, 1)
        rows = self.advantage_clip * (positive_weight * positive_loss + (1 - positive_weight) * negative_loss)
        rows, metrics = rows / self.beta, {"positive_weight": positive_weight}
        if reference is not None:
            kl = ((prediction - reference) ** 2).flatten(1).mean(1) * policy.process.path.output_error_weight(noisy.t)
            rows, metrics["kl"] = rows + self.kl_coef * kl, kl.detach()
        if reference is not None and self.norm_guard_coef:
            level = velocity_level(policy.process.path, noisy.t)
            guard, metrics["velocity_norm_ratio"] = norm_guard(noisy, clean, prediction, reference, level)
            rows = rows + self.norm_guard_coef * guard.float()
        return Loss(experience.weighted(rows / self.num_timesteps), metrics)

    def _levels(self, process: GaussianProcess, rng: Randomness, draw: int) -> Tensor | None:
        """One of the levels at which the sampler calls the network, for each sample: [B]; None: at random."""
        if self.levels == "random":
            return None
        visited = process.path.timesteps(process.num_steps)[:-1].to(rng.rows.device)
        uniform = rng.uniform(Purpose.TIMESTEP, 1, draw=draw).flatten()
        return visited[(uniform * len(visited)).long()]

    def after_update(self, ctx: Context[GaussianProcess]) -> None:
        decay = min(self.old_policy_decay_rate * ctx.rng.step, self.old_policy_decay_max)
        ctx.policy.weights.update_snapshot("old", decay)


def normalized_squared_error(prediction: Tensor, clean: Tensor) -> Tensor:
    """Squared error divided by the absolute error (without gradient), so that all noise levels weigh alike: [B]."""
    with torch.no_grad():
        scale = (prediction.double() - clean.double()).abs().flatten(1).mean(1).clamp(min=1e-5).float()
    return ((prediction - clean) ** 2).flatten(1).mean(1) / scale
