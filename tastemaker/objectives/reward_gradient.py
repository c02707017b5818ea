from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from ..core.objective import Context, Objective
from ..core.randomness import Randomness
from ..core.types import Condition, Loss, PromptBatch
from ..processes.gaussian import GaussianProcess
from .frame_selection import Frames, decode_frames, validate_frames


@dataclass(frozen=True)
class RewardGradientBatch:
    cond: Condition
    rng: Randomness
    made: Tensor | None = None  # [B, ...] clean samples, where they are noised again

    def __len__(self) -> int:
        return len(self.cond)


@dataclass(frozen=True)
class RewardGradient(Objective[GaussianProcess, PromptBatch, RewardGradientBatch, int]):
    """Climb the reward through part of the sampler.

    `tail` is DRaFT-K, and with one step VADER's `last`; `random` and `specific` are VADER's, `normal` AlignProp's: the
    graph begins at the step drawn and goes to the end. `steps` trains the network at those steps alone, `single` is
    ReFL's one step and its guess at the clean sample, `renoised` DRaFT-LV's.
    """

    through: Literal["tail", "random", "normal", "specific", "steps", "single", "renoised"] = "tail"
    tail: int = 1  # steps at the end, for `tail`
    step: int = 15  # from 0, for `specific`
    steps: tuple[int, ...] = ()  # from 0, for `steps`
    stop_input: bool = False  # no gradient through what the network sees (DRTune)
    mean: float = 42.0  # of the first step, for `normal`
    spread: float = 5.0
    span: tuple[int, int] = (30, 39)  # first and last step that may be drawn, for `single`
    copies: int = 2  # for `renoised`
    threshold: float | None = None  # rewards above it earn nothing more (ReFL)
    scale: float = 1.0  # of the loss
    frames: Frames = "all"  # that are decoded and scored
    needs: ClassVar[type] = GaussianProcess
    needs_gradient: ClassVar[bool] = True
    consumes: ClassVar[type] = PromptBatch

    def __post_init__(self) -> None:
        validate_frames(self.frames)
        if self.through == "steps" and not self.steps:
            raise ValueError("'steps' is empty; expected the steps to train at, since 'through' is steps")
        if self.step < 0 or min(self.steps, default=0) < 0:
            raise ValueError(f"found step {self.step}, steps {list(self.steps)}; expected steps from 0, the noisiest")
        if self.tail < 1 or self.copies < 1 or self.spread <= 0 or not 0 <= self.span[0] <= self.span[1]:
            found = f"tail {self.tail}, copies {self.copies}, spread {self.spread}, span {list(self.span)}"
            raise ValueError(f"found {found}; expected tail, copies and spread above 0 and a span from low to high")

    def gradients(self, decisions: int) -> int:
        return self.tail if self.through == "tail" else 1

    def collect(self, ctx: Context[GaussianProcess], batch: PromptBatch) -> RewardGradientBatch:
        cond = ctx.policy.embed(batch.prompts, batch.facts)
        return RewardGradientBatch(
            cond, ctx.rng, ctx.sample(cond, ctx.rng).final if self.through == "renoised" else None
        )

    def parts(self, experience: RewardGradientBatch) -> Sequence[int]:
        return range(self.copies if self.through == "renoised" else 1)

    def first(self, rng: Randomness, steps: int, draw: int = 0) -> int:
        """The step from which the graph is kept, alike on all ranks."""
        if self.through == "normal":
            shared = Randomness(rng.seed, rng.step, torch.zeros(1, dtype=torch.int64))
            tries = (self.mean + self.spread * shared.normal("first", 64, draw=draw)).long().flatten().tolist()
            return next((c for c in tries if 1 <= c < steps), steps - 1)
        low, high = {
            "tail": (max(0, steps - self.tail),) * 2,
            "random": (0, steps - 1),
            "specific": (self.step, self.step),
            "steps": (min(self.steps, default=0),) * 2,
            "single": self.span,
            "renoised": (steps - 1,) * 2,  # what the sampler made is noised to where its last step begins
        }[self.through]
        furthest = max(self.steps) if self.through == "steps" else high
        if furthest >= steps:
            found = f"reward_gradient reaches for step {furthest} of a sampler of {steps}"
            raise ValueError(f"{found}; ask for one below {steps}")
        return low + int(rng.number("first", draw) * (high - low + 1))

    def loss(self, ctx: Context[GaussianProcess], experience: RewardGradientBatch, part: int) -> Loss:
        x = self._sample(ctx, experience, part)
        cond, draw = experience.cond, ctx.epoch * len(self.parts(experience)) + part
        pixels = decode_frames(ctx.policy, x, self.frames, experience.rng, draw)
        scores = ctx.rubric.score(pixels, cond.prompts, cond.facts)
        short = -scores.total if self.threshold is None else F.relu(self.threshold - scores.total)
        watched = {"reward": scores.total.detach(), **{f"reward/{k}": v.detach() for k, v in scores.parts.items()}}
        return Loss(self.scale * short / len(self.parts(experience)), watched)

    def _sample(self, ctx: Context[GaussianProcess], seen: RewardGradientBatch, part: int) -> Tensor:
        process, model = ctx.policy.process, ctx.policy.model
        rollout = process.start(model, seen.cond, seen.rng)
        if seen.made is not None:
            draw, level = ctx.epoch * self.copies + part, rollout.levels[-2].expand(len(seen))
            return process.restore(model, seen.cond, process.corrupt(seen.made, seen.rng, level, draw=draw)).mean
        first = self.first(seen.rng, process.steps, ctx.epoch)
        for i in range(process.steps):
            with torch.set_grad_enabled(i >= first):
                rollout.step(frozen=self.through == "steps" and i not in self.steps, stop_input=self.stop_input)
            if self.through == "single" and i == first:
                return rollout.clean
        return rollout.preview()
