"""RAM: reward-adjusted matching, a regression to the KL-regularized optimum (arXiv 2605.10759)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import Tensor

from ..core.distributions import expand_dims_like
from ..core.group_selection import GroupFilter, PoolSelection
from ..core.objective import Context, Objective, ScoredRollout, require_settings, rollout_and_score
from ..core.randomness import Purpose
from ..core.types import Loss, PromptBatch
from ..processes.gaussian import GaussianProcess
from .advantages import combine_advantages, filter_weights, group_advantages
from .denoising_likelihood import predict_clean, velocity_distance, velocity_level

MIN_TIMESTEP = 1e-3


@dataclass(frozen=True)
class RAM(Objective[GaussianProcess, PromptBatch, ScoredRollout, int]):
    """Fit the reference's velocity plus the advantage times the error of a baseline, without ratio, clip or KL weight.

    The pull to the reference has weight 1, so `reward_multiplier` sets how far the policy may leave it. The paper has
    no clipping of gradient norms: set optim.max_grad_norm=0.
    """

    group_size: int = 8
    reward_multiplier: float = 100.0  # of advantages; 1000 for PickScore in the paper
    baseline: Literal["old", "live"] = "old"  # whose error is scaled: the sampling policy's, or the live one's (eq. 17)
    num_timesteps: int = 8  # noise levels per sample, each with new noise
    time_exponent: float = 1.0  # training levels t have a density proportional to t ** time_exponent
    combine: Literal["rewards", "advantages"] = "rewards"  # what the weighted sum over rewards is taken of
    old_policy_decay_rate: float = 0.01  # EMA decay of the sampling policy: min(rate * step, max)
    old_policy_decay_max: float = 0.9
    filter_groups: GroupFilter | None = None  # which groups train; all if not given
    keep: PoolSelection | None = None  # train on the best and worst of a larger pool (Sol-RL); needs an ODE sampler
    needs: ClassVar[type] = GaussianProcess
    consumes: ClassVar[type] = PromptBatch

    def __post_init__(self) -> None:
        if self.group_size < 2:
            raise ValueError(
                "'group_size': expected at least 2 samples per prompt, because the samples of a prompt are "
                f"compared with each other, got {self.group_size}; raise 'group_size' [TM1564]"
            )
        if self.keep is not None:
            self.keep.check_group_size(self.group_size)
        valid = self.reward_multiplier > 0 and self.num_timesteps >= 1 and self.time_exponent > -1
        expected = "reward_multiplier and num_timesteps above 0, and time_exponent above -1"
        require_settings(self, "reward_multiplier num_timesteps time_exponent", valid, expected)
        decays = self.old_policy_decay_rate >= 0 and 0 <= self.old_policy_decay_max <= 1
        require_settings(
            self, "old_policy_decay_rate old_policy_decay_max", decays, "a rate of at least 0, and a decay from 0 to 1"
        )

    def snapshots(self) -> tuple[str, ...]:
        return ("old", "reference")

    def needs_log_probs(self) -> bool:
        return False

    def collect(self, ctx: Context[GaussianProcess], batch: PromptBatch) -> ScoredRollout:
        with ctx.policy.weights.use("old"):
            trajectory, rng, scores = rollout_and_score(ctx, batch, self.group_size, self.keep)

        def compute_advantages(reward: Tensor) -> Tensor:
            return group_advantages(reward, self.group_size)

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
        """|v - [v_ref + m A (noise - x0 - v_baseline)]|^2 at one noise level per sample, the target without gradient.

        All predictions are conditional and without guidance, also if the samples were guided.
        """
        policy, cond, clean = ctx.policy, experience.trajectory.cond, experience.trajectory.final
        draw = ctx.epoch * self.num_timesteps + part
        t = self.timesteps(experience.rng.uniform(Purpose.TIMESTEP, 1, draw=draw).flatten())
        noisy = policy.corrupt(clean, experience.rng, t, draw=draw)
        old = None
        if self.baseline == "old":
            with policy.weights.use("old"):
                old = predict_clean(policy, cond, noisy)
        with policy.weights.use("reference"):
            reference = predict_clean(policy, cond, noisy)
        prediction = predict_clean(policy, cond, noisy)
        level = velocity_level(policy.process.path, t)
        rows, metrics = self.sample_losses(prediction, clean, level, reference, old, experience.advantage)
        return Loss(experience.weighted(rows / self.num_timesteps), metrics)

    def timesteps(self, uniform: Tensor) -> Tensor:
        """Training levels from uniform numbers: [B]."""
        return (uniform ** (1 / (1 + self.time_exponent))).clamp(min=MIN_TIMESTEP)

    def sample_losses(
        self, prediction: Tensor, clean: Tensor, level: Tensor, reference: Tensor, old: Tensor | None, advantage: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss of each sample [B] from predicted clean samples [B, ...] at levels [B], and metrics.

        The velocity of a prediction is affine in it with the factor -1 / level, so the target of the velocity is
        reached where the predicted clean sample is reference + m A (clean - baseline). Computed in float64: with
        m A of 1000, lower precision would lose the part of the reference.
        """
        live = prediction.detach()
        clean, reference, baseline = (x.double() for x in (clean, reference, live if old is None else old))
        weight = expand_dims_like(self.reward_multiplier * advantage.double(), clean)
        rows = velocity_distance(prediction, reference + weight * (clean - baseline), level)
        # The loss grows with the square of m A and says little: the two parts of its gradient say more.
        toward = (weight * (clean - baseline) * (live.double() - baseline)).flatten(1).mean(1) / level.double() ** 2
        return rows, {"kl": velocity_distance(live, reference, level), "reward_alignment": toward}

    def after_update(self, ctx: Context[GaussianProcess]) -> None:
        decay = min(self.old_policy_decay_rate * ctx.rng.step, self.old_policy_decay_max)
        ctx.policy.weights.update_snapshot("old", decay)
