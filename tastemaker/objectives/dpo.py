from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from ..objective import Context, Objective, rate
from ..policy import Policy, Process
from ..randomness import Randomness
from ..types import Condition, Corrupted, Loss, Pairs, PromptBatch, index

Corruption = Literal["shared", "level", "independent"]


@dataclass(frozen=True)
class Preference:
    cond: Condition
    chosen: Tensor  # [B, ...] in model space
    rejected: Tensor  # [B, ...]
    weight: Tensor  # [B] 0 for a pair that says nothing
    rng: Randomness
    reward: Tensor  # [B] of the two, in the mean; 0 where none was asked

    def __len__(self) -> int:
        return len(self.cond)


def corrupt(policy: Policy[Process], seen: Preference, how: Corruption, draw: int) -> tuple[Corrupted, Corrupted]:
    """Both samples hidden alike, at the same level, or each by itself."""
    chosen = policy.corrupt(seen.chosen, seen.rng, draw=2 * draw)
    if how == "shared":
        return chosen, policy.corrupt(seen.rejected, seen.rng, chosen.t, chosen.noise, draw=2 * draw)
    level = chosen.t if how == "level" else None
    return chosen, policy.corrupt(seen.rejected, seen.rng, level, draw=2 * draw + 1)


def preferred(
    policy: Policy[Process], seen: Preference, noisy: tuple[Corrupted, Corrupted], beta: float, sft: float
) -> Loss:
    """Prefer the chosen by more than the reference does (Rafailov et al. 2023, equation 7)."""
    cond = seen.cond
    with policy.weights.use("reference"):
        was = [policy.likelihood(cond, x, n) for x, n in zip((seen.chosen, seen.rejected), noisy, strict=True)]
    now = [policy.likelihood(cond, x, n) for x, n in zip((seen.chosen, seen.rejected), noisy, strict=True)]
    margin = beta * ((now[0] - was[0]) - (now[1] - was[1]))
    rows = -F.logsigmoid(margin) - sft * now[0] / policy.process.hidden(noisy[0])
    watched = {"accuracy": (margin > 0).float(), "margin": margin.detach(), "chosen": (now[0] - was[0]).detach()}
    return Loss(rows * seen.weight, watched)


@dataclass(frozen=True)
class DPO(Objective[Process, Pairs, Preference, int]):
    """Direct preference optimisation on whatever bound the family has.

    Diffusion-DPO writes beta/2 where this has beta: its 5000 is 2500 here.
    """

    beta: float = 0.1
    sft: float = 0.0  # weight of the plain likelihood of the chosen
    corruption: Corruption = "shared"
    levels: int = 1  # corruptions of each pair
    consumes: ClassVar[type] = Pairs

    def __post_init__(self) -> None:
        if not (self.beta > 0 and self.sft >= 0 and self.levels >= 1):
            found = f"beta {self.beta}, sft {self.sft}, levels {self.levels}"
            raise ValueError(f"found {found}; expected beta above 0, sft of at least 0 and at least one level")

    def snapshots(self) -> tuple[str, ...]:
        return ("reference",)

    @torch.no_grad()
    def collect(self, ctx: Context[Process], batch: Pairs) -> Preference:
        device = ctx.rng.rows.device
        chosen, rejected = (ctx.policy.encode(pixels.to(device)) for pixels in (batch.chosen, batch.rejected))
        nothing = torch.zeros(len(batch), device=device)
        return Preference(ctx.policy.embed(batch.prompts), chosen, rejected, nothing + 1, ctx.rng, nothing)

    def parts(self, experience: Preference) -> Sequence[int]:
        return range(self.levels)

    def loss(self, ctx: Context[Process], experience: Preference, part: int) -> Loss:
        noisy = corrupt(ctx.policy, experience, self.corruption, ctx.epoch * self.levels + part)
        whole = preferred(ctx.policy, experience, noisy, self.beta, self.sft)
        return Loss(whole.rows / self.levels, whole.metrics)


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
