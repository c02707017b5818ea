from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from ..core.distributions import broadcast_to_shape
from ..core.objective import Context, Objective
from ..core.registry import ConfigError
from ..core.types import Condition, Loss, PromptBatch, concatenate, select_rows
from ..processes.gaussian import GaussianProcess
from .srpo_contrast import noise_contrast, prompt_contrast
from .srpo_grid import Branch, BranchLevels, TrainingGrid, level_weights


@dataclass(frozen=True)
class DirectAlignBatch:
    cond: Condition
    clean: Tensor  # [B, ...] what the model makes now, or what the data shows
    noise: Tensor  # [B, ...] known, which is the idea
    place: Tensor  # [B] index drawn on the training grid
    step: Tensor  # [B] the training step, which chooses the control words: from 1, as the published loop counts
    reach: Tensor | None = None  # [B] the longest stride, if not the grid's own

    def __len__(self) -> int:
        return len(self.cond)


@dataclass(frozen=True)
class SRPO(Objective[GaussianProcess, PromptBatch, DirectAlignBatch, tuple[Branch, ...]]):
    """Direct-Align: one step from any noise level, then the clean sample in closed form, for the noise is known.

    The reward is relative: control words before the prompt are praised, others blamed. The inversion branch enters from
    below and adds noise, which flips the sign of the gradient, so praise and blame change places there. Where the data
    shows pictures of its prompts, these are taken for samples (offline), at whatever size they have.
    """

    span: tuple[int, int] = (5, 25)  # levels trained at, as indices into the sampler's grid of `grid` steps
    grid: int = 50
    length: int = 1000  # points of the training grid within the span
    kept: float = 0.9  # ground-truth ratio: the stride is this much short of the whole
    boost_denoise: tuple[float, float] = (0.1, 0.25)  # discount_pos: from the first point to the last
    boost_inversion: tuple[float, float] = (0.3, 0.01)  # discount_inv
    margin: float | None = 0.7  # rewards above it earn nothing more; without it the reward counts as it is
    discount: float | None = None  # weighs rewards by the share of the grid they are at, bent so much: 3 for Qwen-Image
    relative: bool = True  # without it the prompt itself is praised, and blamed under inversion
    grain: float = 0.0  # for rewards that read no prompt: blames the picture with so much noise, instead of words
    praise: tuple[str, ...] = ("Natural-lighting", "Detail", "Detailed", "Real")
    blame: tuple[str, ...] = ("Concept art", "Painting", "Anime", "Flat", "Oil")
    template: str = "{word}. {prompt}"
    branches: tuple[Branch, ...] = ("denoise", "inversion")
    merged: bool = True  # both branches in one pass; one after the other is slower and takes half the memory
    edge: int = 5  # indices left out at both ends of the training grid
    draws: int = 1  # places drawn for each sample, each with a share of the loss
    carried: bool = False  # no stride is longer than those of the draws before, as published for Qwen-Image
    shared_noise: bool = True  # one noise for all prompts of all ranks, as published
    offline: int | None = None  # steps that learn from the data's pictures, if it has any, before samples; all if none
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
        discount = 1.0 if self.discount is None else self.discount
        if self.draws < 1 or self.grain < 0 or (self.offline or 0) < 0 or discount <= 0:
            found = f"draws {self.draws}, grain {self.grain}, offline {self.offline}, discount {self.discount}"
            raise ValueError(f"found {found}; expected at least one draw, a positive discount and nothing below nought")
        if not self.branches or (self.relative and not (self.praise and self.blame)):
            raise ValueError("no branches or no control words; expected at least one of each, or relative: false")
        left = self.template.replace("{prompt}", "").replace("{word}", "")
        if "{prompt}" not in self.template or "{" in left or "}" in left:
            raise ValueError(f"'template' is {self.template!r:.60}; expected {{prompt}}, {{word}} and plain text")

    def kept_rows(self) -> int:
        return self.draws

    def gradients(self, decisions: int) -> int:
        return len(self.branches)

    def rows_at_once(self) -> int:
        return len(self.branches) if self.merged else 1

    @torch.no_grad()
    def collect(self, ctx: Context[GaussianProcess], batch: PromptBatch) -> DirectAlignBatch:
        rng, copies = ctx.rng.repeat(self.draws), torch.arange(len(batch)).repeat_interleave(self.draws)
        cond, clean, noise = select_rows(self._samples(ctx, batch), copies)
        width = self.length - 2 * self.edge + 1
        place = self.edge + (rng.uniform("place", 1).flatten() * width).long()
        reach = self._grid(ctx.policy.process).reach(place)
        if self.carried:
            reach = reach.view(-1, self.draws).cummin(1).values.flatten()
        return DirectAlignBatch(cond, clean, noise, place, torch.full_like(place, rng.step + 1), reach)

    def _samples(self, ctx: Context[GaussianProcess], batch: PromptBatch) -> tuple[Condition, Tensor, Tensor]:
        """Clean samples and the noise to hide them in: made now, or shown by the data."""
        start = ctx.rng.shared() if self.shared_noise else ctx.rng
        cond = ctx.policy.embed(batch.prompts, batch.facts)
        offline = self.offline is None or ctx.rng.step < self.offline
        if batch.pictures is None and offline and self.offline is not None:
            raise ConfigError("objective.offline: the data shows no pictures; set data.type to illustrated_prompts")
        if batch.pictures is None or not offline:
            sample = ctx.sample(cond, start)
            return cond, sample.final, sample.start
        shown = (batch.pictures[rows].to(ctx.rng.rows.device) for rows in ctx.chunks(len(batch)))
        clean = concatenate([ctx.policy.encode(pixels) for pixels in shown])
        return cond, clean, start.normal("start", *clean.shape[1:])

    def parts(self, experience: DirectAlignBatch) -> Sequence[tuple[Branch, ...]]:
        return (self.branches,) if self.merged else [(branch,) for branch in self.branches]

    def _grid(self, process: GaussianProcess) -> TrainingGrid:
        noisiest, cleanest = (float(process.path.grid(self.grid)[i]) for i in self.span)
        return TrainingGrid(noisiest, cleanest, self.length, int((1 - self.kept) * self.length) + 1)

    def levels(
        self, process: GaussianProcess, place: Tensor, branch: Branch, reach: Tensor | None = None
    ) -> BranchLevels:
        """Where a branch enters and lands, if no stride is given with the longest that fits."""
        grid = self._grid(process)
        source, target, at = grid.between(place, grid.reach(place) if reach is None else reach, branch)
        ends = self.boost_denoise if branch == "denoise" else self.boost_inversion
        boost = torch.linspace(*ends, self.length).to(place.device)[at]
        return BranchLevels(source, target, boost, level_weights(at / self.length, self.discount))

    def recover(self, ctx: Context[GaussianProcess], seen: DirectAlignBatch, levels: BranchLevels) -> Tensor:
        """Noise the sample, let the network take one step, and take the known noise out again: [B, ...]."""
        process, path, target = ctx.policy.process, ctx.policy.process.path, levels.target
        noisy = process.corrupt(seen.clean, ctx.rng, levels.source, seen.noise)
        guess = ctx.policy.restore(seen.cond, noisy).mean
        moved = process.move(noisy.x, noisy.t, target, guess)
        return (moved - broadcast_to_shape(path.sigma(target), moved) * seen.noise) / broadcast_to_shape(
            path.alpha(target), moved
        )

    def loss(self, ctx: Context[GaussianProcess], experience: DirectAlignBatch, part: tuple[Branch, ...]) -> Loss:
        process, place, reach = ctx.policy.process, experience.place, experience.reach
        levels = concatenate([self.levels(process, place, branch, reach) for branch in part])
        pixels = ctx.policy.decode(self.recover(ctx, concatenate([experience] * len(part)), levels))
        earned = self._earned(ctx, experience, part, pixels, levels.boost).view(len(part), -1)
        short = -earned if self.margin is None else F.relu(self.margin - earned)
        watched = {f"relative/{branch}": row for branch, row in zip(part, earned.detach(), strict=True)}
        return Loss((levels.weight.view_as(short) * short).sum(0) / len(self.branches), watched)

    def _earned(
        self,
        ctx: Context[GaussianProcess],
        seen: DirectAlignBatch,
        part: tuple[Branch, ...],
        pixels: Tensor,
        boost: Tensor,
    ) -> Tensor:
        """What the rows of each branch earned, one branch after the other: [branches * B]."""
        prompts, facts, step = seen.cond.prompts * len(part), seen.cond.facts * len(part), int(seen.step[0])
        turned = [branch == "inversion" for branch in part for _ in range(len(seen))]
        if not self.relative:
            total = ctx.rubric.score(pixels, prompts, facts).total
            return torch.where(torch.tensor(turned, device=total.device), -total, total)
        if self.grain:
            praised, blamed = noise_contrast(ctx, pixels, prompts, facts, self.grain, turned)
        else:
            words = (self.praise[step % len(self.praise)], self.blame[step % len(self.blame)])
            praise, blame = (self.template.replace("{word}", word) for word in words)
            praised, blamed = prompt_contrast(ctx, pixels, prompts, facts, (praise, blame), turned)
        return (1 + boost) * praised - blamed
