"""GRPO: group-relative policy optimization (Shao et al. 2024), for diffusion as Flow-GRPO, DanceGRPO and MixGRPO."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal, Self, cast

import torch
from torch import Tensor

from ..core.group_selection import GroupFilter
from ..core.objective import (
    Context,
    NoState,
    Objective,
    ObjectiveState,
    ScoredRollout,
    require_settings,
    rollout_and_score,
)
from ..core.policy import Process
from ..core.types import Loss, PromptBatch, Segment
from ..processes.autoregressive import AutoregressiveProcess
from ..processes.gaussian import GaussianProcess
from ..processes.paths import RectifiedFlow
from .advantages import AdvantageKind, PromptTracker, combine_advantages, filter_weights, relative_advantages
from .critical_tokens import confidence_weights, find_critical_tokens
from .ppo import count_actions, importance_weights, kl_to_reference, masked_mean, rollout_precision_metrics
from .timestep_groups import average_groups, find_group_problem, join_segments, split_timesteps, sum_groups
from .trust_region import NEEDS_LATENTS, NEEDS_TOKENS, TrustRegion, trust_region_surrogate


@dataclass(frozen=True)
class GRPO(Objective[Process, PromptBatch, ScoredRollout, int]):
    """GRPO with PPO's clipped ratio and a KL penalty to the reference policy.

    Flow-GRPO, DanceGRPO and MixGRPO are this objective on a Gaussian process with their dynamics and SDE window. GCPO
    is this objective on an autoregressive model with `critical_tokens` and `confidence_clip`. Each sampling step is a
    part of the update with its own call of the network, or up to `timesteps_per_call` of them share one.
    """

    group_size: int = 8
    # Log-probs of latents are means over elements, so useful ranges are small; tokens want 0.2.
    clip_range: float = 1e-4
    clip_range_high: float | None = None  # upper clip range; clip_range if not given
    # What keeps updates near the policy that sampled: PPO's clip, GRPO-Guard's clip of normalized ratios (rectified
    # flow), Flow-DPPO's mask by KL (latents), masks or penalties by token probabilities (tokens), or nothing.
    trust: TrustRegion = "clip"
    # Largest KL (kl: 1e-5) or change of a token's probability (binary_tv: 0.1), scale of penalties (drpo, spo: 0.2)
    trust_threshold: float | None = None
    # Samples of a prompt with the same initial noise: they branch at the one SDE step of a window of size 1, and only
    # branches are compared with each other, so that their rewards are credited to that step (TempFlow-GRPO).
    branches: int = 1
    time_weighting: Literal["uniform", "noise"] = "uniform"  # noise: steps weigh by their noise, as in TempFlow-GRPO
    kl_coef: float = 0.0
    kl_estimator: Literal["k3", "exact"] = "k3"  # Schulman's estimator from the action taken, or the closed form
    # Divided by the standard deviation of the group, of all samples, or (centered, leave_one_out) not at all.
    advantage: AdvantageKind = "group"
    combine: Literal["rewards", "advantages"] = "rewards"  # what the weighted sum over rewards is taken of
    advantage_clip: float = 5.0
    unbiased_std: bool = False  # divide the variance of a group by n - 1
    advantage_eps: float = 1e-4  # added to standard deviations
    tracker_size: int = 32  # rewards kept per prompt, for advantage: tracker
    tracker_min_count: int = 16  # prompts with fewer rewards use the statistics of the batch
    filter_groups: GroupFilter | None = None  # which groups train; all if not given
    # GCPO, autoregressive models: share of tokens of each of three kinds that train, 0.1 as published; 0: all tokens
    critical_tokens: float = 0.0
    # GCPO: clips log policy / reference, whose mean up to a token weights its advantage, at 0.5 as published; 0: off
    confidence_clip: float = 0.0
    # Most sampling steps of a trajectory that one call of the network trains: fewer, larger calls with the same
    # gradient, and memory for as many times the micro-batch
    timesteps_per_call: int = 1
    # 8-bit rollouts of tokens (`engine.rollout_precision`): largest weight of a token, its probability in the training
    # precision divided by that in the rollout (truncated importance sampling)
    importance_cap: float = 2.0
    corrects_rollout_precision: ClassVar[bool] = True
    needs_stochastic: ClassVar[bool] = True
    consumes: ClassVar[type] = PromptBatch

    def __post_init__(self) -> None:
        if self.group_size < 1 or (self.group_size < 2 and self.advantage not in ("global", "tracker")):
            raise ValueError(
                "'group_size': expected at least 2 samples per prompt, because the samples of a prompt are "
                f"compared with each other, got {self.group_size}; raise 'group_size' [TM304]"
            )
        if self.combine == "advantages" and self.advantage == "tracker":
            raise ValueError(
                "'combine': advantages cannot be combined with advantage: tracker, because the tracker keeps one "
                "reward per prompt; choose another 'advantage' [TM305]"
            )
        valid_clip = self.clip_range > 0 and (self.clip_range_high is None or self.clip_range_high > 0)
        require_settings(self, "clip_range clip_range_high", valid_clip, "both above 0")
        valid = self.kl_coef >= 0 and self.advantage_clip > 0
        require_settings(self, "kl_coef advantage_clip", valid, "kl_coef of at least 0 and advantage_clip above 0")

        relative = self.branches == 1 or self.advantage not in ("global", "tracker")
        valid = self.branches >= 1 and self.group_size % self.branches == 0 and relative
        expected = "branches that divide group_size, and with more than one an advantage within groups"
        require_settings(self, "branches group_size advantage", valid, expected)
        valid = self.trust_threshold is None or self.trust_threshold > 0
        require_settings(self, "trust_threshold", valid, "a number above 0, or null for the default")
        if self.trust == "ratio_norm" and self.time_weighting == "noise":
            raise ValueError(
                "'time_weighting': noise and trust: ratio_norm both undo the weight that a step's noise gives it; set "
                "time_weighting to uniform [TM1545]"
            )
        valid = 0 <= self.critical_tokens <= 1 / 3 and self.confidence_clip >= 0
        require_settings(
            self, "critical_tokens confidence_clip", valid, "a share from 0 to 1/3, and a clip of at least 0"
        )
        require_settings(self, "timesteps_per_call", self.timesteps_per_call >= 1, "at least 1")
        require_settings(self, "importance_cap", self.importance_cap >= 1, "at least 1")
        if self.critical_tokens and self.group_size < 2:
            raise ValueError(
                f"'critical_tokens' is {self.critical_tokens}, but 'group_size' is {self.group_size}; tokens are "
                "compared within a group of at least 2 samples"
                " [TM863]"
            )

    def snapshots(self) -> tuple[str, ...]:
        return ("reference",) if self.kl_coef or self.confidence_clip else ()

    def find_problem(self, process: Process, shape: tuple[int, ...]) -> str | None:
        problem = self.find_token_problem(process, shape) or self.find_trust_problem(process)
        return problem or self.find_branch_problem(process) or find_group_problem(process, self.timesteps_per_call)

    def find_branch_problem(self, process: Process) -> str | None:
        """Why trajectories cannot branch at one step of this process; None if they can."""
        if self.branches == 1:
            return None
        if not isinstance(process, GaussianProcess):
            return "objective.branches: tokens have no initial noise to branch from; set objective.branches=1 [TM2201]"
        size = process.window.size if process.window else process.num_steps
        if size == 1:
            return None
        return (
            f"objective.branches is {self.branches}, but {size} sampling steps are random; expected one, at which "
            "samples branch; set process.window.size=1, or objective.branches=1 [TM2202]"
        )

    def find_token_problem(self, process: Process, shape: tuple[int, ...]) -> str | None:
        """Why GCPO's settings do not work with samples of this process and shape; None if they do."""
        if not (self.critical_tokens or self.confidence_clip):
            return None
        if not isinstance(process, AutoregressiveProcess):
            key = "critical_tokens" if self.critical_tokens else "confidence_clip"
            return f"objective.{key}: only autoregressive models have tokens in an order; set objective.{key}=0 [TM864]"
        if self.critical_tokens and (math.isqrt(shape[0]) ** 2 != shape[0] or self.critical_tokens * shape[0] < 1):
            return (
                f"objective.critical_tokens: {self.critical_tokens} of {shape[0]} tokens; expected at least one token "
                f"of a square grid; set it to 1/{shape[0]} or more, or to 0"
                " [TM865]"
            )
        return None

    def find_trust_problem(self, process: Process) -> str | None:
        """Why the trust region does not work with this process; None if it does."""
        latents = isinstance(process, GaussianProcess)
        if latents and self.trust in NEEDS_TOKENS:
            return f"objective.trust: {self.trust} works on tokens; set objective.trust=kl for this model [TM1546]"
        if not latents and self.trust in NEEDS_LATENTS:
            return (
                f"objective.trust: {self.trust} works on diffusion and flow models; set objective.trust=binary_tv for "
                "this model [TM1547]"
            )
        straight = isinstance(process, GaussianProcess) and isinstance(process.path, RectifiedFlow)
        if self.trust == "ratio_norm" and not straight:
            return "objective.trust: ratio_norm works on rectified flow; set objective.trust=kl [TM1548]"
        if self.time_weighting == "noise" and not latents:
            return "objective.time_weighting: tokens have no noise; set objective.time_weighting=uniform [TM1549]"
        return None

    def without_kl(self) -> Self | None:
        return replace(self, kl_coef=0.0) if self.kl_coef else None

    def make_state(self) -> ObjectiveState:
        if self.advantage == "tracker":
            return PromptTracker(self.tracker_size, self.tracker_min_count, self.advantage_eps)
        return NoState()

    def collect(self, ctx: Context[Process], batch: PromptBatch) -> ScoredRollout:
        needs_means = self.trust in NEEDS_LATENTS
        process = ctx.policy.process.with_action_means() if needs_means else ctx.policy.process
        sampling = replace(ctx, policy=replace(ctx.policy, process=process))
        trajectory, rng, scores = rollout_and_score(sampling, batch, self.group_size, branches=self.branches)
        compared = self.branches if self.branches > 1 else self.group_size

        def compute_advantages(reward: Tensor) -> Tensor:
            return relative_advantages(
                ctx,
                trajectory.cond.prompts,
                reward,
                self.advantage,
                compared,
                self.advantage_eps,
                self.unbiased_std,
            )

        if self.combine == "advantages":
            advantage = combine_advantages(ctx.rubric, scores.rewards, compute_advantages)
        else:
            advantage = compute_advantages(scores.total)
        advantage = advantage.clamp(-self.advantage_clip, self.advantage_clip)
        if self.critical_tokens:
            critical = find_critical_tokens(
                cast(Context[AutoregressiveProcess], ctx), trajectory, self.group_size, self.critical_tokens
            )
            segments = tuple(replace(segment, mask=segment.mask * critical) for segment in trajectory.segments)
            trajectory = replace(trajectory, segments=segments)
        weight = filter_weights(ctx, scores.total, self.group_size, self.filter_groups)
        return ScoredRollout(trajectory, rng, scores.total, advantage, scores.rewards, weight)

    def metrics(self, experience: ScoredRollout) -> dict[str, Tensor]:
        rollout = rollout_precision_metrics(experience.trajectory.segments, self.importance_cap)
        return experience.metrics(self.group_size) | rollout

    def parts(self, experience: ScoredRollout) -> Sequence[int]:
        return range(len(split_timesteps(len(experience.trajectory.segments), self.timesteps_per_call)))

    def loss(self, ctx: Context[Process], experience: ScoredRollout, part: int) -> Loss:
        """-[min(r A, clip(r) A) - kl_coef KL(policy || reference)], summed over a segment's actions, over all actions.

        A part is one segment, or a group of `timesteps_per_call` of them. The losses of all parts of a sample add up to
        the mean over its actions. The first term is another one with other trust regions; with `confidence_clip` that
        of each token has a weight, with `time_weighting` that of each step; with 8-bit rollouts of tokens it is
        multiplied by the truncated importance weight.
        """
        segments, reference = experience.trajectory.segments, None
        group = split_timesteps(len(segments), self.timesteps_per_call)[part]
        size = len(group)
        cond, segment = join_segments(experience.trajectory.cond, [segments[i] for i in group])
        if self.kl_coef or self.confidence_clip:
            with ctx.policy.weights.use("reference"):
                reference = ctx.policy.action_distribution(cond, segment)
        policy = ctx.policy.action_distribution(cond, segment)
        log_prob = policy.log_prob(segment.action)
        objective, metrics = trust_region_surrogate(
            self.trust,
            self.trust_threshold,
            policy,
            log_prob,
            segment,
            experience.advantage.repeat(size),
            self.clip_range,
            self.clip_range_high,
        )
        importance = importance_weights(segment, self.importance_cap)
        if importance is not None:
            objective = importance * objective
        if self.time_weighting == "noise":
            process = cast(GaussianProcess, ctx.policy.process)
            objective = objective * torch.cat([noise_weight(process, segments, i) for i in group])
        if reference is not None and self.confidence_clip:
            reference_log_prob = reference.log_prob(segment.action)
            weights = confidence_weights(log_prob, reference_log_prob, self.confidence_clip)
            objective, metrics["confidence_weight"] = weights * objective, masked_mean(weights, segment.mask)
        if reference is not None and self.kl_coef:
            kl = kl_to_reference(policy, reference, segment.action, log_prob, self.kl_estimator)
            objective = objective - self.kl_coef * kl
            metrics["kl"] = masked_mean(kl, segment.mask)
        rows = sum_groups(-(objective * segment.mask).sum(1) / count_actions(segments).repeat(size), size)
        return Loss(experience.weighted(rows), average_groups(metrics, size), steps=size)


def noise_weight(process: GaussianProcess, segments: Sequence[Segment], part: int) -> Tensor:
    """TempFlow-GRPO: standard deviation of a step's noise, divided by its mean over the trained steps: [B, 1]."""
    stds = torch.stack([process.action_std(segment) for segment in segments])
    return (stds[part] / stds.mean(0))[:, None]
