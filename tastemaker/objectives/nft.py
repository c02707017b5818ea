from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal, Self

import torch
from torch import Tensor

from ..core.objective import Context, Objective, ScoredRollout, rollout_and_score
from ..core.types import Loss, PromptBatch
from ..processes.gaussian import GaussianProcess
from .advantages import combine_advantages, group_mean_advantages


@dataclass(frozen=True)
class NFT(Objective[GaussianProcess, PromptBatch, ScoredRollout, int]):
    """DiffusionNFT: on the forward process, go towards good samples and mirror away from bad ones.

    Relations are affine, so the original's mixtures of velocities are mixtures of clean samples here.
    """

    group: int = 8
    beta: float = 1.0
    levels: int = 2  # noise levels of each sample
    strength: float = 5.0  # advantages beyond this count no more, and it scales the loss
    anchor: float = 1e-4  # weight of the squared distance to the reference's prediction; small runs collapse without
    mix: Literal["rewards", "advantages"] = "rewards"  # what is summed by weight; of advantages, weights are shares
    decay_rate: float = 0.001  # the sampling weights trail by min(rate * step, decay_limit)
    decay_limit: float = 0.5
    needs: ClassVar[type] = GaussianProcess
    consumes: ClassVar[type] = PromptBatch

    def __post_init__(self) -> None:
        if self.group < 2:
            raise ValueError(
                f"'group' is {self.group}; expected at least 2 samples a prompt to compare with each other"
            )
        if not (self.beta > 0 and self.levels >= 1 and self.strength > 0 and self.anchor >= 0):
            found = f"beta {self.beta}, levels {self.levels}, strength {self.strength}, anchor {self.anchor}"
            raise ValueError(f"found {found}; expected beta, levels and strength above 0 and anchor of at least 0")

    def gradients(self, decisions: int) -> int:
        return self.levels

    def snapshots(self) -> tuple[str, ...]:
        return ("old", "reference") if self.anchor else ("old",)

    def untied(self) -> Self | None:
        return replace(self, anchor=0.0) if self.anchor else None

    def collect(self, ctx: Context[GaussianProcess], batch: PromptBatch) -> ScoredRollout:
        with ctx.policy.weights.use("old"):
            trajectory, rng, scores = rollout_and_score(ctx, batch, self.group)

        def measured(reward: Tensor) -> Tensor:
            return group_mean_advantages(reward, self.group, ctx.comm.gather(reward))

        split = self.mix == "advantages"
        advantage = combine_advantages(ctx.rubric, scores.parts, measured) if split else measured(scores.total)
        return ScoredRollout(trajectory, rng, scores.total, advantage, scores.parts)

    def watch(self, experience: ScoredRollout) -> dict[str, Tensor]:
        return experience.watched(self.group)

    def parts(self, experience: ScoredRollout) -> Sequence[int]:
        return range(self.levels)

    def loss(self, ctx: Context[GaussianProcess], experience: ScoredRollout, part: int) -> Loss:
        policy, cond, clean = ctx.policy, experience.trajectory.cond, experience.trajectory.final
        noisy = policy.corrupt(clean, experience.rng, draw=ctx.epoch * self.levels + part)
        with policy.weights.use("old"):
            old = policy.restore(cond, noisy).mean
        reference = None
        if self.anchor:
            with policy.weights.use("reference"):
                reference = policy.restore(cond, noisy).mean
        now = policy.restore(cond, noisy).mean
        towards = normalized_squared_error(old + self.beta * (now - old), clean)
        away = normalized_squared_error(old - self.beta * (now - old), clean)
        good = (experience.advantage / (2 * self.strength) + 0.5).clamp(0, 1)
        rows = self.strength * (good * towards + (1 - good) * away) / self.beta
        watched = {"good": good}
        if reference is not None:
            apart = ((now - reference) ** 2).flatten(1).mean(1) * policy.process.path.weight(noisy.t)
            rows, watched = rows + self.anchor * apart, {**watched, "kl": apart.detach()}
        return Loss(rows / self.levels, watched)

    def after_update(self, ctx: Context[GaussianProcess]) -> None:
        ctx.policy.weights.blend("old", min(self.decay_rate * ctx.rng.step, self.decay_limit))


def normalized_squared_error(guess: Tensor, clean: Tensor) -> Tensor:
    """Squared error in units of the absolute one, so that every noise level pulls alike: [B]."""
    with torch.no_grad():
        scale = (guess.double() - clean.double()).abs().flatten(1).mean(1).clamp(min=1e-5).float()
    return ((guess - clean) ** 2).flatten(1).mean(1) / scale
