"""Online and iterative DPO on the model's own samples, with reward guidance if asked for."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from ..core.group_selection import GroupFilter, PoolSelection
from ..core.objective import Context, Objective, require_settings, rollout_and_score
from ..core.policy import Policy, Process
from ..core.types import Loss, PromptBatch
from .advantages import filter_weights
from .denoising_likelihood import find_norm_guard_problem
from .dpo import DPO, NoiseSharing, PreferenceExperience, corrupt_pair, dpo_loss, pair_best_with_worst
from .reward_guidance import check_guidance_name, guidance_loss, make_guidance_batch

ROUND_SNAPSHOT = "round"  # the weights at the start of a round


@dataclass(frozen=True)
class OnlineDPO(Objective[Process, PromptBatch, PreferenceExperience, int]):
    """DPO on the model's own samples: of each prompt's group, the best is preferred to the worst.

    With `round_steps` it is iterative DPO: all samples of a round come from the weights at its start. Random numbers
    depend on step and row only, so samples can be drawn when their step comes, and a round stores nothing but a
    snapshot. With `reward_guidance_coef` the log reward of a judge is maximized too (PARM-guided DPO).
    """

    beta: float = 0.1
    sft_coef: float = 0.0  # weight of the negative log-likelihood of the chosen sample
    noise_sharing: NoiseSharing = "shared"
    num_timesteps: int = 1  # corruptions of each pair
    group_size: int = 4
    round_steps: int = 0  # training steps per round; 0: always sample from the current weights
    reset_reference: bool = True  # each round starts with its own weights as the reference
    # Weight of the squared excess of the velocity's norm over the reference's, on diffusion models
    norm_guard_coef: float = 0.0
    reward_guidance_coef: float = 0.0  # weight of -log reward
    reward_guidance_name: str = ""  # name of that reward; the weighted sum of all if empty
    filter_groups: GroupFilter | None = None  # which groups form pairs; all if not given
    keep: PoolSelection | None = None  # choose the pair among the best and worst of a larger pool; needs an ODE sampler
    consumes: ClassVar[type] = PromptBatch

    def __post_init__(self) -> None:
        # Checks the settings they share.
        DPO(self.beta, self.sft_coef, self.noise_sharing, self.num_timesteps, norm_guard_coef=self.norm_guard_coef)
        if self.group_size < 2:
            raise ValueError(
                f"'group_size': expected at least 2 samples per prompt to form a pair, got {self.group_size}; "
                "raise 'group_size' [TM312]"
            )
        if self.keep is not None:
            self.keep.check_group_size(self.group_size)
        valid = self.round_steps >= 0 and self.reward_guidance_coef >= 0
        require_settings(self, "round_steps reward_guidance_coef", valid, "both to be at least 0")
        check_guidance_name(self.reward_guidance_name, self.reward_guidance_coef)

    def find_problem(self, process: Process, shape: tuple[int, ...]) -> str | None:
        return find_norm_guard_problem(process, self.norm_guard_coef)

    def experience_per_prompt(self) -> int:
        return 1

    def needs_log_probs(self) -> bool:
        return self.reward_guidance_coef > 0

    def snapshots(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys([self._reference, *([ROUND_SNAPSHOT] if self.round_steps else [])]))

    @property
    def _reference(self) -> str:
        return ROUND_SNAPSHOT if self.round_steps and self.reset_reference else "reference"

    def _sampling_weights(self, policy: Policy[Process]) -> AbstractContextManager[None]:
        return policy.weights.use(ROUND_SNAPSHOT) if self.round_steps else nullcontext()

    @torch.no_grad()
    def collect(self, ctx: Context[Process], batch: PromptBatch) -> PreferenceExperience:
        # Pairs need no log-probabilities, which some samplers compute in an extra pass.
        process = ctx.policy.process if self.needs_log_probs() else ctx.policy.process.with_sampled_log_probs()
        with self._sampling_weights(ctx.policy):
            trajectory, _, scores = rollout_and_score(
                replace(ctx, policy=replace(ctx.policy, process=process)), batch, self.group_size, self.keep
            )
        pairs = pair_best_with_worst(trajectory, scores.total, self.group_size, ctx.rng)
        first = torch.arange(len(pairs.weight), device=pairs.weight.device) * self.group_size
        metrics = {"zero_std_groups": 1 - pairs.weight, **{name: x[first] for name, x in scores.pool.items()}}
        filtered = filter_weights(ctx, scores.total, self.group_size, self.filter_groups)
        if filtered is not None:
            pairs = replace(pairs, weight=pairs.weight * filtered[first])
            metrics["kept_groups"] = (filtered[first] > 0).float()
        guidance = None
        if self.reward_guidance_coef:
            guidance = make_guidance_batch(trajectory, scores, self.reward_guidance_name, self.group_size)
        return replace(pairs, reward_guidance=guidance, metrics=metrics)

    def metrics(self, experience: PreferenceExperience) -> dict[str, Tensor]:
        zero_std = experience.metrics["zero_std_groups"].mean()
        return {"reward/mean": experience.reward, **experience.metrics, "zero_std_groups": zero_std}

    def parts(self, experience: PreferenceExperience) -> Sequence[int]:
        guidance_parts = len(experience.reward_guidance.trajectory.segments) if experience.reward_guidance else 0
        return range(self.num_timesteps + guidance_parts)

    def loss(self, ctx: Context[Process], experience: PreferenceExperience, part: int) -> Loss:
        """The DPO loss at one corruption for the first `num_timesteps` parts, then the reward guidance by segment."""
        if part >= self.num_timesteps:
            assert experience.reward_guidance is not None  # or `parts` would end before
            loss = guidance_loss(ctx.policy, experience.reward_guidance, part - self.num_timesteps)
            return Loss(self.reward_guidance_coef * loss.rows, loss.metrics)
        corrupted = corrupt_pair(ctx.policy, experience, self.noise_sharing, ctx.epoch * self.num_timesteps + part)
        settings = self.beta, self.sft_coef, self._reference, self.norm_guard_coef
        loss = dpo_loss(ctx.policy, experience, corrupted, *settings)
        return Loss(loss.rows / self.num_timesteps, loss.metrics)

    def after_update(self, ctx: Context[Process]) -> None:
        if self.round_steps and (ctx.rng.step + 1) % self.round_steps == 0:
            ctx.policy.weights.update_snapshot(ROUND_SNAPSHOT)
