"""The guard against reward hacking: periodic measurements of what the training reward does not measure.

It has its own random numbers and changes no weights, so training with and without it is identical bit for bit.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ..core.randomness import Randomness
from ..core.types import PromptBatch, concatenate, select_rows
from ..rewards.backbones.optical_flow import flicker_score, motion_magnitude
from .drift_statistics import REWARD_PREFIX, SOURCE_DISTANCE, GuardMeasurement
from .events import GuardChecked
from .run import GUARD_STEP, Run
from .samples import read_sources

THUMBNAILS = "thumbnails"
SIDE, FRAMES = 32, 4  # size of thumbnails, small enough that grain does not count as diversity
LEVELS = 64  # of the brightness histogram whose entropy is measured
EDGE, DARK = 0.1, 0.1  # the smallest brightness step of an edge, and the highest brightness of a dark pixel
LUMA = (0.299, 0.587, 0.114)


@torch.no_grad()
def run_guard(run: Run, step: int) -> GuardChecked:
    """Sample the fixed prompts with new noise, record rewards and image statistics, and warn if they drift."""
    batch = run.fixed_prompts(run.guard.prompts)
    with run.engine.autocast(), run.use_sample_weights():
        values, thumbnails = measure_samples(run, batch, step)
    prompts = run.guard.prompts
    per_prompt = {name: value.view(prompts, -1).mean(1) for name, value in values.items()}
    per_prompt |= sample_diversity(thumbnails.view(prompts, run.guard.samples_per_prompt, -1), batch.prompts)
    std = {name: float(value.std()) for name, value in values.items() if name.startswith(REWARD_PREFIX)}
    measurement = GuardMeasurement(step, {name: value.tolist() for name, value in per_prompt.items()}, std)
    run.guard_history.add(measurement)
    return GuardChecked(step, measurement.means(), run.guard_history.hacking_warning())


def measure_samples(run: Run, batch: PromptBatch, step: int) -> tuple[dict[str, Tensor], Tensor]:
    """Generate and measure samples on all ranks; return rewards and statistics [N] each, and thumbnails [N, D].

    Every step has its own noise: the same noise would show the same accidents again, and measurements would not add up.
    """
    comm, count = run.engine.data_parallel, len(batch) * run.guard.samples_per_prompt
    share = -(-count // comm.world_size)  # equal on every rank, so that all make the same calls
    indices = torch.arange(comm.rank * share, (comm.rank + 1) * share) % count
    chunks = torch.split(indices, run.batch.rollout_batch_size or share)
    values = concatenate([_measure_chunk(run, batch, chunk, step * count) for chunk in chunks])
    thumbnails = values.pop(THUMBNAILS)
    table = comm.gather(torch.stack(list(values.values()), 1))[:count].cpu()
    return dict(zip(values, table.unbind(1), strict=True)), comm.gather(thumbnails)[:count].cpu()


def _measure_chunk(run: Run, batch: PromptBatch, indices: Tensor, first_row: int) -> dict[str, Tensor]:
    chunk = select_rows(batch, indices // run.guard.samples_per_prompt)
    rng = Randomness(run.seed, GUARD_STEP, first_row + indices.to(run.engine.device))
    final = run.policy.sample(run.policy.embed(chunk.prompts, chunk.metadata), rng).final
    pixels = run.policy.decode(final).float().clamp(0, 1)
    scores = run.rubric.pointwise().score(pixels, chunk.prompts, chunk.metadata)
    rewards = {f"{REWARD_PREFIX}{name}": reward for name, reward in scores.rewards.items()}
    return {
        "reward/mean": scores.total,
        **rewards,
        **image_statistics(pixels),
        **source_statistics(pixels, read_sources(chunk.prompts, chunk.metadata, *pixels.shape[-2:])),
        THUMBNAILS: make_thumbnails(pixels),
    }


def image_statistics(pixels: Tensor) -> dict[str, Tensor]:
    """Return statistics [N] of each sample: blank, dark, garish or busy images are common results of reward hacking.

    entropy of the brightness histogram in bits; shares of edge pixels and of dark pixels; mean saturation; for videos,
    also those of `motion_statistics`.
    """
    luma = torch.einsum("nfchw,c->nfhw", pixels, pixels.new_tensor(LUMA))
    level = (luma * LEVELS).long().clamp(max=LEVELS - 1).flatten(1)  # [N, F * H * W]
    bins = level + LEVELS * torch.arange(len(level), device=level.device)[:, None]
    histogram = torch.bincount(bins.flatten(), minlength=LEVELS * len(level)).view(len(level), LEVELS)
    shares = histogram / level.shape[1]
    across, down = luma.diff(dim=-1).abs()[..., :-1, :], luma.diff(dim=-2).abs()[..., :-1]
    return {
        "entropy": -(shares * shares.clamp(min=1e-12).log2()).sum(1),
        "edges": (torch.maximum(across, down) > EDGE).float().mean((1, 2, 3)),
        "saturation": (pixels.amax(2) - pixels.amin(2)).mean((1, 2, 3)),
        "dark": (luma < DARK).float().mean((1, 2, 3)),
        **motion_statistics(pixels),
    }


def motion_statistics(pixels: Tensor) -> dict[str, Tensor]:
    """Return optical flow, distance between frames and flicker [N] of each video; nothing for images.

    A video model that is rewarded for single frames learns to stop moving.
    """
    samples, count = pixels.shape[:2]
    if count < 2:
        return {}
    height, width = (min(SIDE, side) for side in pixels.shape[-2:])
    frames = F.adaptive_avg_pool2d(pixels.flatten(1, 2), (height, width)).view(samples, count, -1)
    distance = (frames - frames.mean(1, keepdim=True)).square().mean((1, 2)).sqrt()
    statistics = {"motion": motion_magnitude(pixels), "frames": distance}
    return {**statistics, "flicker": flicker_score(pixels)} if count > 2 else statistics


def source_statistics(pixels: Tensor, sources: Tensor | None) -> dict[str, Tensor]:
    """Return the mean absolute difference [N] between the thumbnails of first frames and of their first source.

    It rises if an editor ignores its source, and falls to nearly nothing if it copies it.
    """
    if sources is None:
        return {}
    first, source = make_thumbnails(pixels[:, :1]), make_thumbnails(sources[:, :1].to(pixels))
    return {SOURCE_DISTANCE: (first - source).abs().mean(1)}


def make_thumbnails(pixels: Tensor) -> Tensor:
    """Return up to FRAMES frames of each sample at SIDE pixels, flattened: [N, D]."""
    picks = torch.linspace(0, pixels.shape[1] - 1, min(FRAMES, pixels.shape[1])).round().long()
    height, width = (min(SIDE, side) for side in pixels.shape[-2:])
    return F.adaptive_avg_pool2d(pixels[:, picks.to(pixels.device)].flatten(1, 2), (height, width)).flatten(1)


def sample_diversity(thumbnails: Tensor, prompts: tuple[str, ...]) -> dict[str, Tensor]:
    """Return root mean square distances [P] between samples [P, K, D].

    diversity: between samples of the same prompt; variety: between samples of different prompts.
    """
    groups, size, features = thumbnails.shape
    flat = thumbnails.flatten(0, 1)
    distance = torch.cdist(flat, flat, compute_mode="donot_use_mm_for_euclid_dist") / features**0.5
    group = torch.arange(groups).repeat_interleave(size)
    text = torch.tensor([prompts.index(prompt) for prompt in prompts]).repeat_interleave(size)
    same_group = (group[:, None] == group) & ~torch.eye(len(flat), dtype=torch.bool)
    other_text = text[:, None] != text
    diversity = {"diversity": _mean_distance(distance, same_group, groups)}
    return {**diversity, "variety": _mean_distance(distance, other_text, groups)} if other_text.any() else diversity


def _mean_distance(distance: Tensor, pairs: Tensor, groups: int) -> Tensor:
    sums, counts = ((x.view(groups, -1).sum(1)) for x in (distance * pairs, pairs.float()))
    return sums / counts
