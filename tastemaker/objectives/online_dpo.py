from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ..objective import Context, Objective, rate
from ..policy import Process
from ..types import Loss, PromptBatch, index
from .dpo import DPO
from .preference import Corruption, Preference, corrupt, preferred


@dataclass(frozen=True)
class OnlineDPO(Objective[Process, PromptBatch, Preference, int]):
    """DPO on pairs made as it goes: of each prompt's samples, the best is preferred to the worst."""

    beta: float = 0.1
    sft: float = 0.0  # weight of the plain likelihood of the chosen
    corruption: Corruption = "shared"
    levels: int = 1  # corruptions of each pair
    group: int = 4  # samples a prompt
    consumes: ClassVar[type] = PromptBatch

    def __post_init__(self) -> None:
        DPO(self.beta, self.sft, self.corruption, self.levels)
        if self.group < 2:
            raise ValueError(f"'group' is {self.group}; expected at least 2 samples a prompt to make a pair of")

    def kept_rows(self) -> int:
        return 1

    def gradients(self, decisions: int) -> int:
        return 2 * self.levels

    def snapshots(self) -> tuple[str, ...]:
        return ("reference",)

    @torch.no_grad()
    def collect(self, ctx: Context[Process], batch: PromptBatch) -> Preference:
        trajectory, _, scores = rate(ctx, batch, self.group)
        groups = scores.total.view(-1, self.group)
        first = torch.arange(len(groups), device=groups.device) * self.group
        best, worst = first + groups.argmax(1), first + groups.argmin(1)
        said = (groups.amax(1) > groups.amin(1)).float()  # a group of equals prefers nothing
        cond, final = index(trajectory.cond, best), trajectory.final
        return Preference(cond, final[best], final[worst], said, ctx.rng, groups.mean(1))

    def watch(self, experience: Preference) -> dict[str, Tensor]:
        return {"reward": experience.reward, "flat_groups": (1 - experience.weight).mean()}

    def parts(self, experience: Preference) -> Sequence[int]:
        return range(self.levels)

    def loss(self, ctx: Context[Process], experience: Preference, part: int) -> Loss:
        noisy = corrupt(ctx.policy, experience, self.corruption, ctx.epoch * self.levels + part)
        whole = preferred(ctx.policy, experience, noisy, self.beta, self.sft)
        return Loss(whole.rows / self.levels, whole.metrics)
