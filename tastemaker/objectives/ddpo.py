from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from ..core.objective import Context, Objective, ObjectiveState, ScoredRollout, rollout_and_score
from ..core.policy import Process
from ..core.types import Loss, PromptBatch
from .advantages import PromptTracker, global_advantages
from .ppo import clipped_surrogate, count_decisions


@dataclass(frozen=True)
class DDPO(Objective[Process, PromptBatch, ScoredRollout, int]):
    """Policy gradients on single samples, each measured against what its prompt earned lately."""

    clip: float = 1e-4
    limit: float = 5.0  # on advantages, either way
    track: int = 32  # rewards remembered of each prompt
    track_from: int = 16  # of a prompt seen less often, the batch speaks
    needs_chance: ClassVar[bool] = True
    consumes: ClassVar[type] = PromptBatch

    def __post_init__(self) -> None:
        if not (self.clip > 0 and self.limit > 0 and self.track >= 1 and self.track_from >= 1):
            found = f"clip {self.clip}, limit {self.limit}, track {self.track}, track_from {self.track_from}"
            raise ValueError(f"found {found}; expected all of them positive")

    def gradients(self, decisions: int) -> int:
        return decisions

    def memory(self) -> ObjectiveState:
        return PromptTracker(self.track, self.track_from)

    def collect(self, ctx: Context[Process], batch: PromptBatch) -> ScoredRollout:
        trajectory, rng, scores = rollout_and_score(ctx, batch, 1)
        prompts, everyone = trajectory.cond.prompts, ctx.comm.gather(scores.total)
        if isinstance(ctx.memory, PromptTracker):
            advantage = ctx.memory.advantages(prompts, scores.total, ctx.comm.gather_objects(prompts), everyone)
        else:
            advantage = global_advantages(scores.total, everyone)
        return ScoredRollout(trajectory, rng, scores.total, advantage.clamp(-self.limit, self.limit), scores.parts)

    def watch(self, experience: ScoredRollout) -> dict[str, Tensor]:
        return {name: x for name, x in experience.watched(1).items() if name != "flat_groups"}  # a group of one is flat

    def parts(self, experience: ScoredRollout) -> Sequence[int]:
        return range(len(experience.trajectory.segments))

    def loss(self, ctx: Context[Process], experience: ScoredRollout, part: int) -> Loss:
        cond, segments = experience.trajectory.cond, experience.trajectory.segments
        log_prob = ctx.policy.decide(cond, segments[part]).log_prob(segments[part].action)
        gain, watched = clipped_surrogate(log_prob, segments[part], experience.advantage, self.clip)
        return Loss(-(gain * segments[part].mask).sum(1) / count_decisions(segments), watched)
