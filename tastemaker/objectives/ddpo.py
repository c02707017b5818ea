from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from ..objective import Context, Memory, Objective, Rated, rate
from ..policy import Process
from ..types import Loss, PromptBatch
from .advantages import PromptTracker, overall
from .surrogate import clipped, decisions


@dataclass(frozen=True)
class DDPO(Objective[Process, PromptBatch, Rated, int]):
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

    def memory(self) -> Memory:
        return PromptTracker(self.track, self.track_from)

    def collect(self, ctx: Context[Process], batch: PromptBatch) -> Rated:
        trajectory, rng, scores = rate(ctx, batch, 1)
        prompts, everyone = trajectory.cond.prompts, ctx.comm.gather(scores.total)
        if isinstance(ctx.memory, PromptTracker):
            advantage = ctx.memory.advantages(prompts, scores.total, ctx.comm.gather_objects(prompts), everyone)
        else:
            advantage = overall(scores.total, everyone)
        return Rated(trajectory, rng, scores.total, advantage.clamp(-self.limit, self.limit), scores.parts)

    def watch(self, experience: Rated) -> dict[str, Tensor]:
        return {name: x for name, x in experience.watched(1).items() if name != "flat_groups"}  # a group of one is flat

    def parts(self, experience: Rated) -> Sequence[int]:
        return range(len(experience.trajectory.segments))

    def loss(self, ctx: Context[Process], experience: Rated, part: int) -> Loss:
        cond, segments = experience.trajectory.cond, experience.trajectory.segments
        log_prob = ctx.policy.decide(cond, segments[part]).log_prob(segments[part].action)
        gain, watched = clipped(log_prob, segments[part], experience.advantage, self.clip)
        return Loss(-(gain * segments[part].mask).sum(1) / decisions(segments), watched)
