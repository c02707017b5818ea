"""Policy gradients on the forward process: ratios of denoising errors or ELBOs instead of sampling probabilities.

AWM (Xue et al. 2025), V-GRPO (2026) and EPG, PEPG and PAR (2026) on diffusion and flow models, ESPO (2025) on
masked-token models. Any sampler generates the samples, and only the final ones are kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal, Self

import torch
from torch import Tensor

from ..core.group_selection import GroupFilter, PoolSelection
from ..core.objective import (
    Context,
    NoState,
    Objective,
    ObjectiveState,
    ScoredRollout,
    require_settings,
    rollout_and_score,
)
from ..core.policy import Policy, Process
from ..core.randomness import Randomness
from ..core.types import Corrupted, Loss, PromptBatch, Trajectory, select_rows
from ..processes.gaussian import GaussianProcess
from ..processes.masked import MaskedProcess
from .advantages import AdvantageKind, PromptTracker, combine_advantages, filter_weights, relative_advantages
from .denoising_likelihood import LikelihoodKind, find_norm_guard_problem, norm_guard
from .likelihood_estimators import (
    DenoisingEstimator,
    ExactEstimator,
    LikelihoodEstimate,
    LikelihoodEstimator,
    MaskedEstimator,
)
from .timestep_sampling import Sharing, TimestepSampling

LossType = Literal["ppo", "epg", "pepg", "par"]
OLD, REFERENCE, LAGGED = "old", "reference", "lagged"  # weight snapshots


@dataclass(frozen=True)
class ForwardRollout(ScoredRollout):
    """Samples with advantages, and their likelihoods under the weights that sampled them."""

    num_levels: int = 1  # corruptions of each sample
    old_likelihood: Tensor | None = None  # [B, num_levels]; None if the loss does not need it


@dataclass(frozen=True)
class Level:
    """One corruption of the samples of a micro-batch. The levels of a micro-batch share a cache."""

    index: int
    cache: dict[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class ElboGRPO(Objective[Process, PromptBatch, ForwardRollout, Level]):
    """Policy gradient whose ratio compares likelihoods at the same noise levels and noise, or at the same masks.

    Masked models use the ELBO of ESPO and autoregressive models their exact likelihood, with one ratio per sample.
    """

    group_size: int = 8
    likelihood: LikelihoodKind = "adaptive"  # how denoising errors become likelihoods, on diffusion and flow models
    ghuber_power: float = 0.25  # of likelihood: ghuber
    num_timesteps: int = 4  # noise levels per sample, or masks with their complements; fewer than 4 may diverge
    # discrete: one of each stratum of the sampler's timesteps, with discrete_wo_init never the first and with
    # discrete_with_init always; uniform, logit_normal: stratified and shifted; path: stratified, as in pretraining
    timestep_sampling: TimestepSampling = "discrete"
    timestep_fraction: float = 1.0  # share of the sampler's timesteps, from the noise on, for discrete sampling
    timestep_shift: float = 3.0  # of uniform and logit_normal sampling
    timestep_sharing: Sharing = "group"  # which samples have the same noise levels, or numbers of masked tokens
    noise_sharing: Sharing = "group"  # which samples have the same noise, or masked positions
    # Of each noise level, or of the mean over the levels of a sample; none: 1, for one update per batch of samples
    ratio: Literal["per_level", "per_sample", "none"] = "per_sample"
    loss_type: LossType = "ppo"
    clip_range: float = 0.01  # of the ratio, with loss_type: ppo; 0: off
    advantage: AdvantageKind = "group"
    combine: Literal["rewards", "advantages"] = "rewards"  # what the weighted sum over rewards is taken of
    advantage_clip: float = 5.0
    advantage_scale: float = 1.0  # advantages are multiplied by it after the clip; AWM: 0.2
    advantage_tanh: float = 0.0  # c: soft clip c tanh(advantage / c), in V-GRPO 3 to 5; 0: off
    advantage_eps: float = 1e-4  # added to standard deviations
    tracker_size: int = 32  # rewards kept per prompt, for advantage: tracker
    tracker_min_count: int = 16  # prompts with fewer rewards use the statistics of the batch
    kl_coef: float = 0.1  # weight of the distance to the reference; small runs collapse without
    old_kl_coef: float = 0.0  # and to the policy that samples
    ema_kl_coef: float = 0.0  # and to a lagged copy of the policy
    # Of distances: network outputs, clean samples (V-GRPO), or outputs divided by twice the variance of Flow-SDE (AWM)
    kl_weighting: Literal["output", "clean", "elbo"] = "output"
    # mse: squared distance of predictions; k1, k2, k3: estimates from likelihoods. Token models always use k2.
    kl_estimator: Literal["mse", "k1", "k2", "k3"] = "mse"
    kl_importance: bool = False  # multiply distances at a noise level by its ratio of likelihoods, with its gradient
    norm_guard_coef: float = 0.0  # weight of the squared excess of the velocity's norm over the reference's
    old_policy_decay_rate: float = 0.0  # EMA decay of the sampling policy: min(rate * step, max); 0: live weights
    old_policy_decay_max: float = 0.5
    ema_decay_rate: float = 0.001  # EMA decay of the lagged copy of ema_kl_coef: min(rate * step, max)
    ema_decay_max: float = 0.3
    filter_groups: GroupFilter | None = None  # which groups train; all if not given
    keep: PoolSelection | None = None  # train on the best and worst of a larger pool (Sol-RL); needs an ODE sampler
    consumes: ClassVar[type] = PromptBatch

    def __post_init__(self) -> None:
        if self.group_size < 1 or (self.group_size < 2 and self.advantage not in ("global", "tracker")):
            raise ValueError(
                "'group_size': expected at least 2 samples per prompt, because the samples of a prompt are "
                f"compared with each other, got {self.group_size}; raise 'group_size' [TM1540]"
            )
        if self.combine == "advantages" and self.advantage == "tracker":
            raise ValueError(
                "'combine': advantages cannot be combined with advantage: tracker, because the tracker keeps one "
                "reward per prompt; choose another 'advantage' [TM1541]"
            )
        if self.keep is not None:
            self.keep.check_group_size(self.group_size)
        counts = self.num_timesteps >= 1 and self.ghuber_power > 0 and self.timestep_shift > 0
        require_settings(self, "num_timesteps ghuber_power timestep_shift", counts, "numbers above 0")
        require_settings(self, "timestep_fraction", 0 < self.timestep_fraction <= 1, "a share above 0 and up to 1")
        coefficients = "kl_coef old_kl_coef ema_kl_coef norm_guard_coef clip_range advantage_tanh"
        valid = all(getattr(self, name) >= 0 for name in coefficients.split())
        require_settings(self, coefficients, valid, "numbers of at least 0")
        positive = self.advantage_clip > 0 and self.advantage_scale > 0
        require_settings(self, "advantage_clip advantage_scale", positive, "numbers above 0")
        rates = "old_policy_decay_rate old_policy_decay_max ema_decay_rate ema_decay_max"
        valid = all(0 <= getattr(self, name) <= 1 for name in rates.split())
        require_settings(self, rates, valid, "rates from 0 to 1")

    def find_problem(self, process: Process, shape: tuple[int, ...]) -> str | None:
        if isinstance(process, GaussianProcess):
            return None
        if self.ratio == "per_level":
            return (
                "objective.ratio: per_level works on diffusion and flow models only, because ratios of single masks "
                "collapse; set objective.ratio=per_sample [TM1542]"
            )
        if self.kl_importance:
            return (
                "objective.kl_importance: it weights distances at single noise levels, which token models do not have; "
                "their KL is one number per sample. Set objective.kl_importance=false [TM2764]"
            )
        return find_norm_guard_problem(process, self.norm_guard_coef)

    def needs_log_probs(self) -> bool:
        return False

    def snapshots(self) -> tuple[str, ...]:
        used = {
            OLD: bool(self.old_kl_coef or self.old_policy_decay_rate),
            REFERENCE: bool(self.kl_coef or self.norm_guard_coef),
            LAGGED: bool(self.ema_kl_coef),
        }
        return tuple(name for name, is_used in used.items() if is_used)

    def without_kl(self) -> Self | None:
        return replace(self, kl_coef=0.0) if self.kl_coef else None

    def make_state(self) -> ObjectiveState:
        if self.advantage == "tracker":
            return PromptTracker(self.tracker_size, self.tracker_min_count, self.advantage_eps)
        return NoState()

    def make_estimator(self, process: Process) -> LikelihoodEstimator:
        """The corruptions of samples of this process, and their likelihoods."""
        if isinstance(process, GaussianProcess):
            return DenoisingEstimator(
                process,
                self.likelihood,
                self.ghuber_power,
                self.num_timesteps,
                self.timestep_sampling,
                self.timestep_fraction,
                self.timestep_shift,
                self.timestep_sharing,
                self.noise_sharing,
                self.rows_per_prompt(),
            )
        if isinstance(process, MaskedProcess):
            return MaskedEstimator(
                process, self.num_timesteps, self.timestep_sharing, self.noise_sharing, self.rows_per_prompt()
            )
        return ExactEstimator()

    @torch.no_grad()
    def collect(self, ctx: Context[Process], batch: PromptBatch) -> ForwardRollout:
        process = ctx.policy.process.with_sampled_log_probs()  # nothing reads them; some samplers need another pass
        sampling = replace(ctx, policy=replace(ctx.policy, process=process))
        estimator = self.make_estimator(ctx.policy.process)
        old_likelihood = None
        with self._sampling_weights(ctx.policy):
            trajectory, rng, scores = rollout_and_score(sampling, batch, self.group_size, self.keep)
            trajectory = replace(trajectory, segments=())
            if self._compares_with_old() or self.kl_importance:
                chunks = [select_rows((trajectory, rng), rows) for rows in ctx.chunks(len(trajectory))]
                old_likelihood = torch.cat([all_likelihoods(ctx.policy, estimator, *chunk) for chunk in chunks])

        def compute_advantages(reward: Tensor) -> Tensor:
            prompts = trajectory.cond.prompts
            return relative_advantages(ctx, prompts, reward, self.advantage, self.group_size, self.advantage_eps)

        if self.combine == "advantages":
            advantage = combine_advantages(ctx.rubric, scores.rewards, compute_advantages)
        else:
            advantage = compute_advantages(scores.total)
        advantage = self.shape_advantages(advantage)
        weight = filter_weights(ctx, scores.total, self.group_size, self.filter_groups)
        rewards = scores.total, advantage, scores.rewards, weight, scores.pool
        return ForwardRollout(trajectory, rng, *rewards, estimator.num_levels, old_likelihood)

    def _compares_with_old(self) -> bool:
        """Whether the surrogate reads the likelihoods under the weights that sampled."""
        return self.ratio != "none" or self.loss_type in ("pepg", "par")

    def _sampling_weights(self, policy: Policy[Process]) -> AbstractContextManager[None]:
        return policy.weights.use(OLD) if self.old_policy_decay_rate else nullcontext()

    def shape_advantages(self, advantage: Tensor) -> Tensor:
        """Clip, scale and soft-clip advantages: [B]."""
        advantage = advantage.clamp(-self.advantage_clip, self.advantage_clip) * self.advantage_scale
        if not self.advantage_tanh:
            return advantage
        return self.advantage_tanh * torch.tanh(advantage / self.advantage_tanh)

    def metrics(self, experience: ForwardRollout) -> dict[str, Tensor]:
        return experience.metrics(self.group_size)

    def parts(self, experience: ForwardRollout) -> Sequence[Level]:
        cache: dict[str, Tensor] = {}
        return [Level(index, cache) for index in range(experience.num_levels)]

    def loss(self, ctx: Context[Process], experience: ForwardRollout, part: Level) -> Loss:
        """The surrogate of `loss_type` plus the anchors, at one corruption; the corruptions of a sample add up.

        The ratio of a sample needs all its corruptions. The first call of a micro-batch computes it without gradients;
        then each corruption is back-propagated by itself, with the derivative of the surrogate as its weight.
        """
        policy, trajectory, rng = ctx.policy, experience.trajectory, experience.rng
        estimator = self.make_estimator(policy.process)
        noisy = estimator.corrupt(policy, trajectory.final, rng, part.index)
        on_tokens = not isinstance(policy.process, GaussianProcess)
        per_sample = self.ratio == "per_sample" and experience.num_levels > 1
        per_sample |= on_tokens and (experience.old_likelihood is not None or bool(self._anchors()))
        if per_sample and not part.cache:
            part.cache.update(self._sample_terms(policy, estimator, experience, on_tokens))
        others: dict[str, LikelihoodEstimate] = {}
        for name in () if on_tokens else self._anchors():
            with policy.weights.use(name):
                others[name] = estimator.estimate(policy, trajectory.cond, trajectory.final, noisy)
        current = estimator.estimate(policy, trajectory.cond, trajectory.final, noisy)
        old = None if experience.old_likelihood is None else experience.old_likelihood[:, part.index]
        if per_sample:
            likelihood, terms = current.likelihood, dict(part.cache)
            value, slope = terms.pop("value"), terms.pop("slope")
            rows, metrics = value + slope * (likelihood - likelihood.detach()), terms
        else:
            rows, metrics = self.surrogate(
                current.likelihood, old if self._compares_with_old() else None, experience.advantage
            )
        penalty, anchor_metrics = self.anchor_penalty(current, others, noisy, trajectory.final, old)
        rows = experience.weighted((rows + penalty) / experience.num_levels)
        return Loss(rows, {**metrics, **anchor_metrics})

    def _anchors(self) -> dict[str, float]:
        """Weight snapshots that the policy is kept close to, with their coefficients."""
        coefficients = {REFERENCE: self.kl_coef, OLD: self.old_kl_coef, LAGGED: self.ema_kl_coef}
        needed = {name for name, coefficient in coefficients.items() if coefficient}
        needed |= {REFERENCE} if self.norm_guard_coef else set()
        return {name: coefficient for name, coefficient in coefficients.items() if name in needed}

    def surrogate(
        self, likelihood: Tensor, old_likelihood: Tensor | None, advantage: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Loss [B] of likelihoods [B] under the current and the sampling policy, and its metrics.

        With d = likelihood - old and r = exp(d): ppo is max(-A r, -A clip(r)), epg is -r A likelihood, pepg is
        -r (A - d) likelihood and par is r (A - d)^2 / 2; r and d of epg and pepg and r of par have no gradient.
        """
        old = likelihood.detach() if old_likelihood is None else old_likelihood
        difference = likelihood - old
        ratio = difference.exp()
        metrics = {"ratio": ratio.detach(), "ratio_deviation": (ratio.detach() - 1).abs()}
        if self.loss_type == "ppo":
            clipped = ratio.clamp(1 - self.clip_range, 1 + self.clip_range) if self.clip_range else ratio
            metrics["clip_fraction"] = (ratio != clipped).to(ratio.dtype)
            return torch.maximum(-advantage * ratio, -advantage * clipped), metrics
        weight = torch.ones_like(ratio) if self.ratio == "none" else ratio
        weight = weight.detach()
        if self.loss_type == "epg":
            return -weight * advantage * likelihood, metrics
        if self.loss_type == "pepg":
            return -weight * (advantage - difference.detach()) * likelihood, metrics
        return 0.5 * weight * (advantage - difference) ** 2, metrics

    def _sample_terms(
        self, policy: Policy[Process], estimator: LikelihoodEstimator, experience: ForwardRollout, on_tokens: bool
    ) -> dict[str, Tensor]:
        """Value of the loss of each sample, its slope by the mean likelihood, and metrics: [B] each.

        On token models the KL of the anchors is one number per sample too: k2, L / 2 (likelihood - other)^2.
        """
        trajectory, rng = experience.trajectory, experience.rng
        old = None if experience.old_likelihood is None else experience.old_likelihood.mean(1)
        others: dict[str, Tensor] = {}
        for name in self._anchors() if on_tokens else ():
            with policy.weights.use(name):
                others[name] = all_likelihoods(policy, estimator, trajectory, rng).mean(1)
        mean = all_likelihoods(policy, estimator, trajectory, rng).mean(1)
        with torch.enable_grad():
            mean.requires_grad_(True)
            rows, metrics = self.surrogate(mean, old, experience.advantage)
            for name, other in others.items():
                kl = trajectory.final.shape[1] / 2 * (mean - other) ** 2
                rows = rows + self._anchors()[name] * kl
                metrics["kl" if name == REFERENCE else f"{name}_kl"] = kl.detach()
            (slope,) = torch.autograd.grad(rows.sum(), mean)
        return {"value": rows.detach(), "slope": slope, **metrics}

    def anchor_penalty(
        self,
        current: LikelihoodEstimate,
        others: dict[str, LikelihoodEstimate],
        noisy: Corrupted,
        clean: Tensor,
        old_likelihood: Tensor | None = None,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Weighted distances to other policies at one noise level, and metrics: [B] each.

        With `kl_importance` a distance D estimates its mean over samples of the current policy instead of the sampling
        one: it is w D with w = exp(likelihood - old). The mean of w D under the sampling policy has the gradient of
        w (grad D + D grad likelihood), so w keeps its gradient. With k1, D = likelihood - reference, this is the
        gradient of KL(policy || reference); without the gradient of w it would be zero on average.
        """
        penalty, metrics = torch.zeros_like(current.likelihood), {}
        weight = torch.ones_like(penalty)
        if self.kl_importance and old_likelihood is not None:
            weight = (current.likelihood - old_likelihood).exp()
        for name, other in others.items():
            assert current.prediction is not None and other.prediction is not None and current.level is not None
            kl = self.distance(current, other)
            penalty = penalty + self._anchors()[name] * weight * kl
            metrics["kl" if name == REFERENCE else f"{name}_kl"] = kl.detach()
            if name == REFERENCE:
                guard, metrics["velocity_norm_ratio"] = norm_guard(
                    noisy, clean, current.prediction, other.prediction, current.level
                )
                if self.norm_guard_coef:
                    penalty = penalty + self.norm_guard_coef * guard
        return penalty, metrics

    def distance(self, current: LikelihoodEstimate, other: LikelihoodEstimate) -> Tensor:
        """Distance of two predictions at one noise level by `kl_estimator` and `kl_weighting`: [B]."""
        if self.kl_estimator != "mse":
            difference = current.likelihood - other.likelihood
            if self.kl_estimator == "k1":
                return difference
            return difference**2 / 2 if self.kl_estimator == "k2" else difference.expm1() - difference
        assert current.prediction is not None and other.prediction is not None
        assert current.level is not None and current.output_weight is not None
        kl = ((current.prediction.double() - other.prediction.double()) ** 2).flatten(1).mean(1)
        if self.kl_weighting == "clean":
            return kl
        level, kl = current.level.double(), current.output_weight * kl
        return kl / (2 * 0.7**2 * level / (1 - level.clamp(max=0.99))) if self.kl_weighting == "elbo" else kl

    def after_update(self, ctx: Context[Process]) -> None:
        step = ctx.rng.step
        if OLD in self.snapshots():
            decay = min(self.old_policy_decay_rate * step, self.old_policy_decay_max)
            ctx.policy.weights.update_snapshot(OLD, decay)
        if LAGGED in self.snapshots():
            ctx.policy.weights.update_snapshot(LAGGED, min(self.ema_decay_rate * step, self.ema_decay_max))


@torch.no_grad()
def all_likelihoods(
    policy: Policy[Process], estimator: LikelihoodEstimator, trajectory: Trajectory, rng: Randomness
) -> Tensor:
    """Likelihoods of samples at all their corruptions, without gradients: [B, num_levels]."""
    x, cond = trajectory.final, trajectory.cond
    likelihoods = []
    for level in range(estimator.num_levels):
        noisy = estimator.corrupt(policy, x, rng, level)
        likelihoods.append(estimator.estimate(policy, cond, x, noisy).likelihood)
    return torch.stack(likelihoods, 1)
