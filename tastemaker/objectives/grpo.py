from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal, Self

from torch import Tensor

from ..core.objective import Context, NoState, Objective, ObjectiveState, ScoredRollout, rollout_and_score
from ..core.policy import Process
from ..core.types import Loss, PromptBatch
from . import advantages
from .ppo import clipped_surrogate, count_decisions


@dataclass(frozen=True)
class GRPO(Objective[Process, PromptBatch, ScoredRollout, int]):
    """Group-relative policy optimisation under PPO's clipped ratio, with a penalty for leaving the reference.

    Flow-GRPO, DanceGRPO and MixGRPO are this on a Gaussian process with their dynamics and window.
    """

    group: int = 8
    clip: float = 1e-4  # log-probs of latents are means over elements, so useful ranges are small; tokens want 0.2
    rise: float | None = None  # how far ratios may rise above 1, if not by clip too
    kl: float = 0.0
    divergence: Literal["k3", "exact"] = "k3"  # Schulman's estimator from the action taken, or the closed form
    advantage: Literal["group", "group_mean", "global", "tracker"] = "group"
    mix: Literal["rewards", "advantages"] = "rewards"  # what is summed by weight; of advantages, weights are shares
    limit: float = 5.0  # on advantages, either way
    unbiased: bool = False  # divide a group's spread by n - 1
    floor: float = 1e-4  # added to spreads
    track: int = 32  # rewards remembered of each prompt, by the tracker
    track_from: int = 16  # of a prompt seen less often, the batch speaks
    needs_chance: ClassVar[bool] = True
    consumes: ClassVar[type] = PromptBatch

    def __post_init__(self) -> None:
        if self.group < 1 or (self.group < 2 and self.advantage.startswith("group")):
            raise ValueError(
                f"'group' is {self.group}; expected at least 2 samples a prompt to compare with each other"
            )
        if self.mix == "advantages" and self.advantage == "tracker":
            raise ValueError(
                "'mix' is advantages, but the tracker remembers one reward a prompt; use another advantage"
            )
        if not (self.clip > 0 and (self.rise is None or self.rise > 0) and self.kl >= 0 and self.limit > 0):
            found = f"clip {self.clip}, rise {self.rise}, kl {self.kl}, limit {self.limit}"
            raise ValueError(f"found {found}; expected them positive, or kl 0")

    def snapshots(self) -> tuple[str, ...]:
        return ("reference",) if self.kl else ()

    def untied(self) -> Self | None:
        return replace(self, kl=0.0) if self.kl else None

    def gradients(self, decisions: int) -> int:
        return decisions

    def memory(self) -> ObjectiveState:
        tracked = self.advantage == "tracker"
        return advantages.PromptTracker(self.track, self.track_from, self.floor) if tracked else NoState()

    def collect(self, ctx: Context[Process], batch: PromptBatch) -> ScoredRollout:
        trajectory, rng, scores = rollout_and_score(ctx, batch, self.group)

        def measured(reward: Tensor) -> Tensor:
            return self._advantage(ctx, trajectory.cond.prompts, reward)

        split = self.mix == "advantages"
        advantage = (
            advantages.combine_advantages(ctx.rubric, scores.parts, measured) if split else measured(scores.total)
        )
        return ScoredRollout(trajectory, rng, scores.total, advantage.clamp(-self.limit, self.limit), scores.parts)

    def _advantage(self, ctx: Context[Process], prompts: Sequence[str], reward: Tensor) -> Tensor:
        if self.advantage == "group":
            return advantages.group_advantages(reward, self.group, self.unbiased, self.floor)
        everyone = ctx.comm.gather(reward)
        if self.advantage == "group_mean":
            return advantages.group_mean_advantages(reward, self.group, everyone, self.floor)
        if isinstance(ctx.memory, advantages.PromptTracker):
            return ctx.memory.advantages(prompts, reward, ctx.comm.gather_objects(prompts), everyone)
        return advantages.global_advantages(reward, everyone, self.floor)

    def watch(self, experience: ScoredRollout) -> dict[str, Tensor]:
        return experience.watched(self.group)

    def parts(self, experience: ScoredRollout) -> Sequence[int]:
        return range(len(experience.trajectory.segments))

    def loss(self, ctx: Context[Process], experience: ScoredRollout, part: int) -> Loss:
        cond, segments = experience.trajectory.cond, experience.trajectory.segments
        segment, reference = segments[part], None
        if self.kl:
            with ctx.policy.weights.use("reference"):
                reference = ctx.policy.decide(cond, segment)
        now = ctx.policy.decide(cond, segment)
        log_prob = now.log_prob(segment.action)
        gain, watched = clipped_surrogate(log_prob, segment, experience.advantage, self.clip, self.rise)
        if reference is not None:
            change = reference.log_prob(segment.action) - log_prob
            away = change.expm1() - change if self.divergence == "k3" else now.kl(reference)
            gain = gain - self.kl * away
            watched["kl"] = ((away * segment.mask).sum(1) / segment.mask.sum(1).clamp(min=1)).detach()
        return Loss(-(gain * segment.mask).sum(1) / count_decisions(segments), watched)
