from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from ..core.objective import Context, Objective, rollout_and_score
from ..core.policy import Policy, Process
from ..core.types import Loss, PromptBatch, select_rows
from .dpo import DPO
from .preference_loss import Corruption, PreferenceExperience, corrupt_pair, dpo_loss
from .reward_guidance import guidance_loss, make_guidance_batch

ROUND_SNAPSHOT = "round"  # the weights a round began with


@dataclass(frozen=True)
class OnlineDPO(Objective[Process, PromptBatch, PreferenceExperience, int]):
    """DPO on pairs made as it goes: of each prompt's samples, the best is preferred to the worst.

    With `round` it is iterative DPO: all samples of a round are of the weights it began with. They are made when their
    step comes, yet are those that would be made at its start, for draws belong to rows; so a round has nothing to store
    but its first weights. With `guide` a judge's reward of the samples counts too (PARM-guided DPO).
    """

    beta: float = 0.1
    sft: float = 0.0  # weight of the plain likelihood of the chosen
    corruption: Corruption = "shared"
    levels: int = 1  # corruptions of each pair
    group: int = 4  # samples a prompt
    round: int = 0  # steps of one; 0: samples are always of the present weights
    renew: bool = True  # with each round the reference begins anew
    guide: float = 0.0  # weight of minus the logarithm of the judge's reward
    guide_by: str = ""  # that reward's name; the sum of all if not given
    consumes: ClassVar[type] = PromptBatch

    def __post_init__(self) -> None:
        DPO(self.beta, self.sft, self.corruption, self.levels)
        if self.group < 2:
            raise ValueError(f"'group' is {self.group}; expected at least 2 samples a prompt to make a pair of")
        if self.round < 0 or self.guide < 0:
            raise ValueError(f"found round {self.round}, guide {self.guide}; expected both to be at least 0")
        if self.guide_by and not self.guide:
            raise ValueError(f"'guide_by' is {self.guide_by!r:.60}, but 'guide' is 0; give it a weight, such as 0.1")

    def kept_rows(self) -> int:
        return 1

    def replays(self) -> bool:
        return self.guide > 0

    def gradients(self, decisions: int) -> int:
        return 2 * self.levels + (decisions if self.guide else 0)

    def rows_at_once(self) -> int:
        return 2  # both of a pair

    def snapshots(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys([self._reference, *([ROUND_SNAPSHOT] if self.round else [])]))

    @property
    def _reference(self) -> str:
        return ROUND_SNAPSHOT if self.round and self.renew else "reference"

    def _sampling(self, policy: Policy[Process]) -> AbstractContextManager[None]:
        return policy.weights.use(ROUND_SNAPSHOT) if self.round else nullcontext()

    @torch.no_grad()
    def collect(self, ctx: Context[Process], batch: PromptBatch) -> PreferenceExperience:
        # Pairs need no log-probabilities, which some samplers would score once more.
        process = ctx.policy.process if self.replays() else ctx.policy.process.as_sampled()
        with self._sampling(ctx.policy):
            trajectory, _, scores = rollout_and_score(
                replace(ctx, policy=replace(ctx.policy, process=process)), batch, self.group
            )
        groups = scores.total.view(-1, self.group)
        first = torch.arange(len(groups), device=groups.device) * self.group
        best, worst = first + groups.argmax(1), first + groups.argmin(1)
        said = (groups.amax(1) > groups.amin(1)).float()  # a group of equals prefers nothing
        cond, final = select_rows(trajectory.cond, best), trajectory.final
        pairs = PreferenceExperience(cond, final[best], final[worst], said, ctx.rng, groups.mean(1))
        return (
            replace(pairs, steering=make_guidance_batch(trajectory, scores, self.guide_by, self.group))
            if self.guide
            else pairs
        )

    def watch(self, experience: PreferenceExperience) -> dict[str, Tensor]:
        return {"reward": experience.reward, "flat_groups": (1 - experience.weight).mean()}

    def parts(self, experience: PreferenceExperience) -> Sequence[int]:
        steps = len(experience.steering.trajectory.segments) if experience.steering else 0
        return range(self.levels + steps)

    def loss(self, ctx: Context[Process], experience: PreferenceExperience, part: int) -> Loss:
        if part >= self.levels:
            assert experience.steering is not None  # parts says so
            steering = guidance_loss(ctx.policy, experience.steering, part - self.levels)
            return Loss(self.guide * steering.rows, steering.metrics)
        noisy = corrupt_pair(ctx.policy, experience, self.corruption, ctx.epoch * self.levels + part)
        whole = dpo_loss(ctx.policy, experience, noisy, self.beta, self.sft, self._reference)
        return Loss(whole.rows / self.levels, whole.metrics)

    def after_update(self, ctx: Context[Process]) -> None:
        if self.round and (ctx.rng.step + 1) % self.round == 0:
            ctx.policy.weights.blend(ROUND_SNAPSHOT)
