from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from ..distributions import like
from ..objective import Context, Objective
from ..processes.gaussian import GaussianProcess
from ..types import Condition, Loss, PromptBatch

Branch = Literal["denoise", "inversion"]


@dataclass(frozen=True)
class Levels:
    """Where a branch enters and lands, and how much more praise weighs than blame; one value a row: [B]."""

    source: Tensor
    target: Tensor
    boost: Tensor


@dataclass(frozen=True)
class Aligned:
    cond: Condition
    clean: Tensor  # [B, ...] what the model makes now
    noise: Tensor  # [B, ...] known, which is the idea
    place: Tensor  # [B] index drawn on the training grid
    step: Tensor  # [B] the training step, which chooses the control words

    def __len__(self) -> int:
        return len(self.cond)


@dataclass(frozen=True)
class SRPO(Objective[GaussianProcess, PromptBatch, Aligned, Branch]):
    """Direct-Align: one step from any noise level, then the clean sample in closed form, for the noise is known.

    The reward is relative: control words before the prompt are praised, others blamed. The inversion branch enters from
    below and adds noise, which flips the sign of the gradient, so praise and blame change places there.
    """

    span: tuple[int, int] = (5, 25)  # levels trained at, as indices into the sampler's grid of `grid` steps
    grid: int = 50
    length: int = 1000  # points of the training grid within the span
    kept: float = 0.9  # ground-truth ratio: the stride is this much short of the whole
    boost_denoise: tuple[float, float] = (0.1, 0.25)  # discount_pos: from the first point to the last
    boost_inversion: tuple[float, float] = (0.3, 0.01)  # discount_inv
    margin: float | None = 0.7  # rewards above it earn nothing more; without it the reward counts as it is
    relative: bool = True  # without it the prompt itself is praised, and blamed under inversion
    praise: tuple[str, ...] = ("Natural-lighting", "Detail", "Detailed", "Real")
    blame: tuple[str, ...] = ("Concept art", "Painting", "Anime", "Flat", "Oil")
    template: str = "{word}. {prompt}"
    branches: tuple[Branch, ...] = ("denoise", "inversion")
    edge: int = 5  # indices left out at both ends of the training grid
    shared_noise: bool = True  # one noise for all prompts of all ranks, as published
    needs: ClassVar[type] = GaussianProcess
    needs_gradient: ClassVar[bool] = True
    consumes: ClassVar[type] = PromptBatch

    def __post_init__(self) -> None:
        if not 0 <= self.span[0] < self.span[1] <= self.grid:
            raise ValueError(
                f"'span' is {list(self.span)}; expected two rising indices within a grid of {self.grid} steps"
            )
        if not (0 < self.kept < 1 and self.edge >= 1 and 2 * self.edge < self.length):
            found = f"kept {self.kept}, edge {self.edge}, length {self.length}"
            raise ValueError(f"found {found}; expected kept within 0 and 1 and a length of more than two edges")
        if not self.branches or (self.relative and not (self.praise and self.blame)):
            raise ValueError("no branches or no control words; expected at least one of each, or relative: false")
        left = self.template.replace("{prompt}", "").replace("{word}", "")
        if "{prompt}" not in self.template or "{" in left or "}" in left:
            raise ValueError(f"'template' is {self.template!r:.60}; expected {{prompt}}, {{word}} and plain text")

    @torch.no_grad()
    def collect(self, ctx: Context[GaussianProcess], batch: PromptBatch) -> Aligned:
        rng = ctx.rng
        start = rng.shared() if self.shared_noise else rng
        cond = ctx.policy.embed(batch.prompts, batch.facts)
        sample = ctx.sample(cond, start)
        width = self.length - 2 * self.edge + 1
        place = self.edge + (rng.uniform("place", 1).flatten() * width).long()
        return Aligned(cond, sample.final, sample.start, place, torch.full_like(place, rng.step))

    def parts(self, experience: Aligned) -> Sequence[Branch]:
        return self.branches

    def levels(self, process: GaussianProcess, place: Tensor, branch: Branch) -> Levels:
        """The published index arithmetic: both branches land on (nearly) the same level."""
        whole = process.path.grid(self.grid)
        length, stride = self.length, int((1 - self.kept) * self.length) + 1
        points = torch.linspace(float(whole[self.span[0]]), float(whole[self.span[1]]), length).to(place.device)
        reach = torch.minimum(torch.minimum(length - place, place), torch.full_like(place, stride))
        at = place if branch == "denoise" else (place - reach).clamp(min=1)
        high, low = points[length - (at + reach).clamp(max=length)], points[length - at]
        ends = self.boost_denoise if branch == "denoise" else self.boost_inversion
        boost = torch.linspace(*ends, length).to(place.device)[at]
        return Levels(high, low, boost) if branch == "denoise" else Levels(low, high, boost)

    def recover(self, ctx: Context[GaussianProcess], seen: Aligned, levels: Levels) -> Tensor:
        """Noise the sample, let the network take one step, and take the known noise out again: [B, ...]."""
        process, path, target = ctx.policy.process, ctx.policy.process.path, levels.target
        noisy = process.corrupt(seen.clean, ctx.rng, levels.source, seen.noise)
        guess = ctx.policy.restore(seen.cond, noisy).mean
        moved = process.move(noisy.x, noisy.t, target, guess)
        return (moved - like(path.sigma(target), moved) * seen.noise) / like(path.alpha(target), moved)

    def loss(self, ctx: Context[GaussianProcess], experience: Aligned, part: Branch) -> Loss:
        levels = self.levels(ctx.policy.process, experience.place, part)
        pixels = ctx.policy.decode(self.recover(ctx, experience, levels))
        earned = self._earned(ctx, experience, part, pixels, levels.boost)
        short = -earned if self.margin is None else F.relu(self.margin - earned)
        return Loss(short / len(self.branches), {f"relative/{part}": earned.detach()})

    def _earned(
        self, ctx: Context[GaussianProcess], seen: Aligned, part: Branch, pixels: Tensor, boost: Tensor
    ) -> Tensor:
        prompts, facts, step = seen.cond.prompts, seen.cond.facts, int(seen.step[0])
        if not self.relative:
            sign = 1 if part == "denoise" else -1
            return sign * ctx.rubric.score(pixels, prompts, facts).total
        words = [self.praise[step % len(self.praise)], self.blame[step % len(self.blame)]]
        for_us, against = words if part == "denoise" else reversed(words)
        both = [[self.template.format(word=word, prompt=p) for p in prompts] for word in (for_us, against)]
        praised, blamed = (scores.total for scores in ctx.rubric.score_each(pixels, both, facts))
        return (1 + boost) * praised - blamed
