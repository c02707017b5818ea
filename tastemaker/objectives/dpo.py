from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from ..core.objective import Context, Objective
from ..core.policy import Process
from ..core.types import Loss, PreferenceBatch
from .preference_loss import Corruption, PreferenceExperience, corrupt_pair, dpo_loss


@dataclass(frozen=True)
class DPO(Objective[Process, PreferenceBatch, PreferenceExperience, int]):
    """Direct preference optimisation on whatever bound the family has.

    Diffusion-DPO writes beta/2 where this has beta: its 5000 is 2500 here.
    """

    beta: float = 0.1
    sft: float = 0.0  # weight of the plain likelihood of the chosen
    corruption: Corruption = "shared"
    levels: int = 1  # corruptions of each pair
    drop: float = 0.0  # share of pairs that are told apart without their caption, so that guidance keeps its contrast
    consumes: ClassVar[type] = PreferenceBatch

    def __post_init__(self) -> None:
        if not (self.beta > 0 and self.sft >= 0 and self.levels >= 1):
            found = f"beta {self.beta}, sft {self.sft}, levels {self.levels}"
            raise ValueError(f"found {found}; expected beta above 0, sft of at least 0 and at least one level")
        if not 0 <= self.drop <= 1:
            raise ValueError(f"'drop' is {self.drop}; expected the share of captions to drop, from 0 to 1")

    def gradients(self, decisions: int) -> int:
        return 2 * self.levels

    def rows_at_once(self) -> int:
        return 2  # both of a pair

    def snapshots(self) -> tuple[str, ...]:
        return ("reference",)

    @torch.no_grad()
    def collect(self, ctx: Context[Process], batch: PreferenceBatch) -> PreferenceExperience:
        device = ctx.rng.rows.device
        chosen, rejected = (ctx.policy.encode(pixels.to(device)) for pixels in (batch.chosen, batch.rejected))
        nothing = torch.zeros(len(batch), device=device)
        dropped = (ctx.here().uniform("drop", 1).flatten() < self.drop).tolist()
        prompts = ["" if gone else prompt for prompt, gone in zip(batch.prompts, dropped, strict=True)]
        return PreferenceExperience(ctx.policy.embed(prompts), chosen, rejected, nothing + 1, ctx.rng, nothing)

    def parts(self, experience: PreferenceExperience) -> Sequence[int]:
        return range(self.levels)

    def loss(self, ctx: Context[Process], experience: PreferenceExperience, part: int) -> Loss:
        noisy = corrupt_pair(ctx.policy, experience, self.corruption, ctx.epoch * self.levels + part)
        whole = dpo_loss(ctx.policy, experience, noisy, self.beta, self.sft)
        return Loss(whole.rows / self.levels, whole.metrics)
