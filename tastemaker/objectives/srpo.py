"""SRPO: Direct-Align with semantic relative preferences (Shen et al. 2025)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from ..core.distributions import expand_dims_like
from ..core.objective import Context, Objective, require_settings
from ..core.randomness import Purpose, Randomness
from ..core.registry import ConfigError
from ..core.types import Condition, Loss, Metadata, PromptBatch, Prompts, concatenate, select_rows
from ..processes.gaussian import GaussianProcess
from .scored_frames import Frames, decode_frames, validate_frames

Branch = Literal["denoise", "inversion"]


@dataclass(frozen=True)
class DirectAlignBatch:
    """Clean samples with the noise they are corrupted by, and where on the training grid."""

    cond: Condition
    clean: Tensor  # [B, ...] the model's samples, or images of the data
    noise: Tensor  # [B, ...] known, so that the clean sample can be recovered in closed form
    grid_index: Tensor  # [B] index on the training grid
    step: Tensor  # [B] the training step, from 1 as in the published loop; it chooses the control words
    max_stride: Tensor | None = None  # [B] longest stride; the grid's own if not given
    frame: Tensor | None = None  # [B] uniform numbers that choose the scored frame, for frames: random

    def __len__(self) -> int:
        return len(self.cond)


@dataclass(frozen=True)
class BranchLevels:
    """Noise levels between which a branch steps, and how its reward counts: [B] each."""

    source: Tensor
    target: Tensor
    boost: Tensor  # extra weight of the positive reward over the negative one
    weight: Tensor  # of the loss


@dataclass(frozen=True)
class TrainingGrid:
    """`length` evenly spaced noise levels; indices count from the cleanest one."""

    noisiest: float
    cleanest: float
    length: int
    stride: int  # longest step, in grid points

    def max_stride(self, index: Tensor) -> Tensor:
        """The longest step from an index that stays on the grid, in both directions: [B]."""
        room = torch.minimum(self.length - index, index)
        return torch.minimum(room, torch.full_like(index, self.stride))

    def source_and_target(self, index: Tensor, stride: Tensor, branch: Branch) -> tuple[Tensor, Tensor, Tensor]:
        """Source level, target level and the index that weights the reward: [B] each.

        Denoising steps down onto the level of `index`; inversion starts a stride below and steps up onto (nearly) it.
        """
        levels = torch.linspace(self.noisiest, self.cleanest, self.length).to(index.device)
        lower = index if branch == "denoise" else (index - stride).clamp(min=1)
        high, low = levels[self.length - (lower + stride).clamp(max=self.length)], levels[self.length - lower]
        return (high, low, lower) if branch == "denoise" else (low, high, lower)


def timestep_weights(share: Tensor, shift: float | None) -> Tensor:
    """Weights from 0 at the clean end of the grid to 1 at the noisy end, bent by a timestep shift; ones without."""
    return torch.ones_like(share) if shift is None else shift * share / (1 + (shift - 1) * share)


@dataclass(frozen=True)
class SRPO(Objective[GaussianProcess, PromptBatch, DirectAlignBatch, tuple[Branch, ...]]):
    """Direct-Align: one network step from any noise level, then the clean sample in closed form with the known noise.

    The reward is relative: the score with positive control words before the prompt minus that with negative ones. The
    inversion branch adds noise, which flips the sign of the gradient, so positive and negative words swap there. If the
    data has images for its prompts, they replace the model's samples (offline), at any size.
    """

    timestep_range: tuple[int, int] = (5, 25)  # trained noise levels, as indices into `num_grid_steps` sampling steps
    num_grid_steps: int = 50
    num_train_timesteps: int = 1000  # points of the training grid within the range
    groundtruth_ratio: float = 0.9  # the stride is 1 minus this share of the grid
    discount_pos: tuple[float, float] = (0.1, 0.25)  # boost of the positive reward, from the first point to the last
    discount_inv: tuple[float, float] = (0.3, 0.01)  # likewise for the inversion branch
    reward_margin: float | None = 0.7  # hinge: rewards above it are not increased further; none: plain reward
    timestep_weight_shift: float | None = None  # weight the loss by timestep, shifted by this: 3 for Qwen-Image
    relative: bool = True  # false: score the prompt itself, negated under inversion
    contrast_noise: float = 0.0  # for rewards without prompts: the negative is the image with this much noise
    positive_words: tuple[str, ...] = ("Natural-lighting", "Detail", "Detailed", "Real")
    negative_words: tuple[str, ...] = ("Concept art", "Painting", "Anime", "Flat", "Oil")
    template: str = "{word}. {prompt}"
    branches: tuple[Branch, ...] = ("denoise", "inversion")
    batch_branches: bool = True  # both branches in one pass; one after the other is slower, with half the memory
    grid_margin: int = 5  # points left out at both ends of the training grid
    timesteps_per_sample: int = 1
    monotone_stride: bool = False  # strides of a sample's timesteps never grow, as published for Qwen-Image
    shared_noise: bool = True  # one initial noise for all prompts of all ranks, as published
    frames: Frames = "all"  # frames of a video that are decoded and scored
    offline_steps: int | None = None  # training steps on the data's images, before samples; none: all if it has any
    needs: ClassVar[type] = GaussianProcess
    needs_gradient: ClassVar[bool] = True
    consumes: ClassVar[type] = PromptBatch

    def __post_init__(self) -> None:
        validate_frames(self.frames)
        if not 0 <= self.timestep_range[0] < self.timestep_range[1] <= self.num_grid_steps:
            raise ValueError(
                f"'timestep_range': expected two increasing indices from 0 to {self.num_grid_steps}, the number "
                f"of grid steps, got {list(self.timestep_range)}; correct 'timestep_range' [TM319]"
            )
        require_settings(
            self,
            "groundtruth_ratio grid_margin num_train_timesteps",
            0 < self.groundtruth_ratio < 1 and 1 <= self.grid_margin < self.num_train_timesteps / 2,
            "a ratio between 0 and 1, and a margin of at least 1 and below half of the timesteps",
        )
        shift = 1.0 if self.timestep_weight_shift is None else self.timestep_weight_shift
        require_settings(
            self,
            "timesteps_per_sample contrast_noise offline_steps timestep_weight_shift",
            self.timesteps_per_sample >= 1 and min(self.contrast_noise, self.offline_steps or 0) >= 0 and shift > 0,
            "at least one timestep, a shift above 0 and the others at least 0",
        )
        if not self.branches or (self.relative and not (self.positive_words and self.negative_words)):
            raise ValueError(
                "'branches', 'positive_words' or 'negative_words' is empty; add at least one entry to each, or "
                "set relative: false to train without control words [TM320]"
            )
        rest = self.template.replace("{prompt}", "").replace("{word}", "")
        if "{prompt}" not in self.template or "{" in rest or "}" in rest:
            raise ValueError(
                "'template': expected text with {prompt} and {word} and without other braces, got "
                f"{self.template!r:.60}; write for example {{word}}. {{prompt}} [TM321]"
            )

    def experience_per_prompt(self) -> int:
        return self.timesteps_per_sample

    def needs_log_probs(self) -> bool:
        return False

    @torch.no_grad()
    def collect(self, ctx: Context[GaussianProcess], batch: PromptBatch) -> DirectAlignBatch:
        copies = torch.arange(len(batch)).repeat_interleave(self.timesteps_per_sample)
        rng = ctx.rng.repeat(self.timesteps_per_sample)
        cond, clean, noise = select_rows(self._samples(ctx, batch), copies)
        num_indices = self.num_train_timesteps - 2 * self.grid_margin + 1
        index = self.grid_margin + (rng.uniform(Purpose.GRID_INDEX, 1).flatten() * num_indices).long()
        stride = self._grid(ctx.policy.process).max_stride(index)
        if self.monotone_stride:
            stride = stride.view(-1, self.timesteps_per_sample).cummin(1).values.flatten()
        frame = rng.uniform(Purpose.FRAME, 1).flatten()
        return DirectAlignBatch(cond, clean, noise, index, torch.full_like(index, rng.step + 1), stride, frame)

    def _samples(self, ctx: Context[GaussianProcess], batch: PromptBatch) -> tuple[Condition, Tensor, Tensor]:
        """Condition, clean samples and noise: sampled from the model, or images of the data (offline)."""
        start = ctx.rng.same_for_all_rows() if self.shared_noise else ctx.rng
        cond = ctx.policy.embed(batch.prompts, batch.metadata)
        offline = self.offline_steps is None or ctx.rng.step < self.offline_steps
        if batch.images is None and offline and self.offline_steps is not None:
            raise ConfigError(
                "objective.offline_steps: the data does not contain images; set data.type to "
                "prompts_with_images, or remove objective.offline_steps [TM322]"
            )
        if batch.images is None or not offline:
            sample = ctx.sample(cond, start)
            return cond, sample.final, sample.start
        images = (batch.images[rows].to(ctx.rng.rows.device) for rows in ctx.chunks(len(batch)))
        clean = concatenate([ctx.policy.encode(pixels) for pixels in images])
        return cond, clean, start.normal(Purpose.INITIAL_NOISE, *clean.shape[1:])

    def parts(self, experience: DirectAlignBatch) -> Sequence[tuple[Branch, ...]]:
        return (self.branches,) if self.batch_branches else [(branch,) for branch in self.branches]

    def _grid(self, process: GaussianProcess) -> TrainingGrid:
        noisiest, cleanest = (float(process.path.timesteps(self.num_grid_steps)[i]) for i in self.timestep_range)
        stride = int((1 - self.groundtruth_ratio) * self.num_train_timesteps) + 1
        return TrainingGrid(noisiest, cleanest, self.num_train_timesteps, stride)

    def levels(
        self, process: GaussianProcess, index: Tensor, branch: Branch, stride: Tensor | None = None
    ) -> BranchLevels:
        """Source and target level of a branch at grid indices [B]; without a stride, the longest that fits."""
        grid = self._grid(process)
        stride = grid.max_stride(index) if stride is None else stride
        source, target, index = grid.source_and_target(index, stride, branch)
        discount = self.discount_pos if branch == "denoise" else self.discount_inv
        boost = torch.linspace(*discount, self.num_train_timesteps).to(index.device)[index]
        weight = timestep_weights(index / self.num_train_timesteps, self.timestep_weight_shift)
        return BranchLevels(source, target, boost, weight)

    def recover_clean(self, ctx: Context[GaussianProcess], batch: DirectAlignBatch, levels: BranchLevels) -> Tensor:
        """Corrupt the sample, take one network step from source to target, and remove the known noise: [B, ...]."""
        process, path, target = ctx.policy.process, ctx.policy.process.path, levels.target
        noisy = process.corrupt(batch.clean, ctx.rng, levels.source, batch.noise)
        clean = ctx.policy.restore(batch.cond, noisy).mean
        x = process.ode_step(noisy.x, noisy.t, target, clean)
        return (x - expand_dims_like(path.sigma(target), x) * batch.noise) / expand_dims_like(path.alpha(target), x)

    def loss(self, ctx: Context[GaussianProcess], experience: DirectAlignBatch, part: tuple[Branch, ...]) -> Loss:
        """max(0, margin - relative reward), or -reward without a margin, averaged over the branches."""
        process, index, stride = ctx.policy.process, experience.grid_index, experience.max_stride
        levels = concatenate([self.levels(process, index, branch, stride) for branch in part])
        clean = self.recover_clean(ctx, concatenate([experience] * len(part)), levels)
        frame = torch.zeros(len(experience)) if experience.frame is None else experience.frame
        pixels = decode_frames(ctx.policy, clean, self.frames, frame.repeat(len(part)))  # the same in all branches
        reward = self._relative_reward(ctx, experience, part, pixels, levels.boost).view(len(part), -1)
        rows = -reward if self.reward_margin is None else F.relu(self.reward_margin - reward)
        metrics = {f"relative_reward/{branch}": row for branch, row in zip(part, reward.detach(), strict=True)}
        return Loss((levels.weight.view_as(rows) * rows).sum(0) / len(self.branches), metrics)

    def _relative_reward(
        self,
        ctx: Context[GaussianProcess],
        batch: DirectAlignBatch,
        part: tuple[Branch, ...],
        pixels: Tensor,
        boost: Tensor,
    ) -> Tensor:
        """(1 + boost) positive - negative reward of every branch, one branch after the other: [branches * B]."""
        prompts, metadata = batch.cond.prompts * len(part), batch.cond.metadata * len(part)
        swapped = [branch == "inversion" for branch in part for _ in range(len(batch))]
        if not self.relative:
            total = ctx.rubric.score(pixels, prompts, metadata).total
            return torch.where(torch.tensor(swapped, device=total.device), -total, total)
        if self.contrast_noise:
            positive, negative = noise_contrast(ctx, pixels, prompts, metadata, self.contrast_noise, swapped)
        else:
            step = int(batch.step[0])
            words = (vocabulary[step % len(vocabulary)] for vocabulary in (self.positive_words, self.negative_words))
            templates = [self.template.replace("{word}", word) for word in words]
            positive, negative = prompt_contrast(ctx, pixels, prompts, metadata, templates, swapped)
        return (1 + boost) * positive - negative


def noise_contrast(
    ctx: Context[GaussianProcess],
    pixels: Tensor,
    prompts: Prompts,
    metadata: Sequence[Metadata],
    noise_std: float,
    swapped: Sequence[bool],
) -> tuple[Tensor, Tensor]:
    """Rewards of the images and of the images with noise, the same for all: [B] each, exchanged where `swapped`."""
    shared = Randomness(ctx.rng.seed, ctx.rng.step, torch.zeros_like(ctx.rng.rows[:1]))
    noisy_pixels = (pixels + noise_std * shared.normal(Purpose.CONTRAST_NOISE, *pixels.shape[1:])).clamp(0, 1)
    clean, noisy = (ctx.rubric.score(images, prompts, metadata).total for images in (pixels, noisy_pixels))
    swap = torch.tensor(swapped, device=clean.device)
    return torch.where(swap, noisy, clean), torch.where(swap, clean, noisy)


def prompt_contrast(
    ctx: Context[GaussianProcess],
    pixels: Tensor,
    prompts: Prompts,
    metadata: Sequence[Metadata],
    templates: Sequence[str],
    swapped: Sequence[bool],
) -> tuple[Tensor, Tensor]:
    """Rewards of the images under the positive and the negative template: [B] each, exchanged where `swapped`."""
    prompt_sets = [
        [templates[i ^ swap].replace("{prompt}", prompt) for prompt, swap in zip(prompts, swapped, strict=True)]
        for i in (0, 1)
    ]
    positive, negative = (scores.total for scores in ctx.rubric.score_each(pixels, prompt_sets, metadata))
    return positive, negative
