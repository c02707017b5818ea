"""DDPO: denoising diffusion policy optimization (Black et al. 2023)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from ..core.objective import (
    Context,
    Objective,
    ObjectiveState,
    ScoredRollout,
    require_settings,
    rollout_and_score,
)
from ..core.policy import Process
from ..core.types import Loss, PromptBatch
from .advantages import PromptTracker, tracked_advantages
from .ppo import clipped_surrogate, count_actions, importance_weights, rollout_precision_metrics
from .timestep_groups import average_groups, find_group_problem, join_segments, split_timesteps, sum_groups


@dataclass(frozen=True)
class DDPO(Objective[Process, PromptBatch, ScoredRollout, int]):
    """Clipped policy gradient on one sample per prompt, with advantages from per-prompt reward statistics.

    Each sampling step of a trajectory is a part of the update with its own call of the network, or up to
    `timesteps_per_call` of them share one.
    """

    clip_range: float = 1e-4
    advantage_clip: float = 5.0
    tracker_size: int = 32  # rewards kept per prompt
    tracker_min_count: int = 16  # prompts with fewer rewards use the statistics of the batch
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
        valid = self.clip_range > 0 and self.advantage_clip > 0 and min(self.tracker_size, self.tracker_min_count) > 0
        names = "clip_range advantage_clip tracker_size tracker_min_count"
        require_settings(self, names, valid, "all of them above 0")
        require_settings(self, "timesteps_per_call", self.timesteps_per_call >= 1, "at least 1")
        require_settings(self, "importance_cap", self.importance_cap >= 1, "at least 1")

    def find_problem(self, process: Process, shape: tuple[int, ...]) -> str | None:
        return find_group_problem(process, self.timesteps_per_call)

    def make_state(self) -> ObjectiveState:
        return PromptTracker(self.tracker_size, self.tracker_min_count)

    def collect(self, ctx: Context[Process], batch: PromptBatch) -> ScoredRollout:
        trajectory, rng, scores = rollout_and_score(ctx, batch, 1)
        advantage = tracked_advantages(ctx, trajectory.cond.prompts, scores.total)
        advantage = advantage.clamp(-self.advantage_clip, self.advantage_clip)
        return ScoredRollout(trajectory, rng, scores.total, advantage, scores.rewards)

    def metrics(self, experience: ScoredRollout) -> dict[str, Tensor]:
        metrics = experience.metrics(1)
        del metrics["zero_std_groups"]  # every group of one sample is one
        return metrics | rollout_precision_metrics(experience.trajectory.segments, self.importance_cap)

    def parts(self, experience: ScoredRollout) -> Sequence[int]:
        return range(len(split_timesteps(len(experience.trajectory.segments), self.timesteps_per_call)))

    def loss(self, ctx: Context[Process], experience: ScoredRollout, part: int) -> Loss:
        """-min(r A, clip(r) A), summed over the actions of one part and divided by the number of all actions."""
        segments = experience.trajectory.segments
        group = split_timesteps(len(segments), self.timesteps_per_call)[part]
        size = len(group)
        cond, segment = join_segments(experience.trajectory.cond, [segments[i] for i in group])
        log_prob = ctx.policy.action_distribution(cond, segment).log_prob(segment.action)
        objective, metrics = clipped_surrogate(log_prob, segment, experience.advantage.repeat(size), self.clip_range)
        importance = importance_weights(segment, self.importance_cap)
        if importance is not None:
            objective = importance * objective
        rows = sum_groups(-(objective * segment.mask).sum(1) / count_actions(segments).repeat(size), size)
        return Loss(rows, average_groups(metrics, size), steps=size)
