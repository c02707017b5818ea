"""The guard against reward hacking: periodic measurements of what the training reward does not measure.

It draws from numbers of its own and touches no weight, so a run with it and one without it are the same to the bit.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ..core.randomness import Randomness
from ..core.types import PromptBatch, concatenate, select_rows
from ..rewards.backbones.optical_flow import flicker_score, motion_magnitude
from .drift_statistics import REWARD_PREFIX, GuardMeasurement
from .events import GuardChecked
from .run import GUARD_STEP, Run

THUMBNAILS = "small pictures"
SIDE, FRAMES = 32, 4  # pictures are compared at this size, so that grain does not count as diversity
LEVELS = 64  # of brightness, whose distribution has an entropy
EDGE, DARK = 0.1, 0.1  # a step in brightness, and a level of it
LUMA = (0.299, 0.587, 0.114)


@torch.no_grad()
def run_guard(run: Run, step: int) -> GuardChecked:
    """Sample the fixed prompts, record rewards and image statistics, and return a warning if they drift."""
    chosen = run.asked(run.guard.prompts)
    with run.engine.computing(), run.shown():
        values, small = measure_samples(run, chosen)
    groups = run.guard.prompts
    rows = {name: each.view(groups, -1).mean(1) for name, each in values.items()}
    rows |= sample_diversity(small.view(groups, run.guard.per_prompt, -1), chosen.prompts)
    spread = {name: float(each.std()) for name, each in values.items() if name.startswith(REWARD_PREFIX)}
    run.history.add(GuardMeasurement(step, {name: each.tolist() for name, each in rows.items()}, spread))
    return GuardChecked(step, run.history.looks[-1].means(), run.history.suspicion())


def measure_samples(run: Run, chosen: PromptBatch) -> tuple[dict[str, Tensor], Tensor]:
    """Rewards and features [N] of all samples and small pictures [N, D], made by all ranks together."""
    comm, count = run.engine.rows, len(chosen) * run.guard.per_prompt
    share = -(-count // comm.world)  # as many on every rank, so that all make the same calls
    mine = torch.arange(comm.rank * share, (comm.rank + 1) * share) % count
    chunks = torch.split(mine, run.batch.rollout or share)
    values = concatenate([_measure_chunk(run, chosen, rows) for rows in chunks])
    small = values.pop(THUMBNAILS)
    table = comm.gather(torch.stack(list(values.values()), 1))[:count].cpu()
    return dict(zip(values, table.unbind(1), strict=True)), comm.gather(small)[:count].cpu()


def _measure_chunk(run: Run, chosen: PromptBatch, rows: Tensor) -> dict[str, Tensor]:
    batch = select_rows(chosen, rows // run.guard.per_prompt)
    rng = Randomness(run.seed, GUARD_STEP, rows.to(run.engine.device))
    final = run.policy.sample(run.policy.embed(batch.prompts, batch.facts), rng).final
    pixels = run.policy.decode(final).float().clamp(0, 1)
    scores = run.rubric.score(pixels, batch.prompts, batch.facts)
    rewards = {"reward": scores.total, **{f"{REWARD_PREFIX}{name}": part for name, part in scores.parts.items()}}
    return {**rewards, **image_statistics(pixels), THUMBNAILS: downscale(pixels)}


def image_statistics(pixels: Tensor) -> dict[str, Tensor]:
    """How pictures look, each by itself: [N]. Rewards are gamed by blank, dark, garish or busy pictures."""
    luma = torch.einsum("nfchw,c->nfhw", pixels, pixels.new_tensor(LUMA))
    level = (luma * LEVELS).long().clamp(max=LEVELS - 1).flatten(1)  # [N, F * H * W]
    place = level + LEVELS * torch.arange(len(level), device=level.device)[:, None]
    shares = torch.bincount(place.flatten(), minlength=LEVELS * len(level)).view(len(level), LEVELS) / level.shape[1]
    across, down = luma.diff(dim=-1).abs()[..., :-1, :], luma.diff(dim=-2).abs()[..., :-1]
    return {
        "entropy": -(shares * shares.clamp(min=1e-12).log2()).sum(1),  # bits
        "edges": (torch.maximum(across, down) > EDGE).float().mean((1, 2, 3)),
        "saturation": (pixels.amax(2) - pixels.amin(2)).mean((1, 2, 3)),
        "dark": (luma < DARK).float().mean((1, 2, 3)),
        **motion_statistics(pixels),
    }


def motion_statistics(pixels: Tensor) -> dict[str, Tensor]:
    """How clips move, each by itself: [N]; nothing of stills. A clip paid for its pictures alone comes to rest."""
    rows, count = pixels.shape[:2]
    if count < 2:
        return {}
    height, width = (min(SIDE, side) for side in pixels.shape[-2:])
    frames = F.adaptive_avg_pool2d(pixels.flatten(1, 2), (height, width)).view(rows, count, -1)
    apart = (frames - frames.mean(1, keepdim=True)).square().mean((1, 2)).sqrt()
    found = {"motion": motion_magnitude(pixels), "frames": apart}
    return {**found, "flicker": flicker_score(pixels)} if count > 2 else found


def downscale(pixels: Tensor) -> Tensor:
    """At most a few small frames of each, as a row: [N, D]."""
    picks = torch.linspace(0, pixels.shape[1] - 1, min(FRAMES, pixels.shape[1])).round().long()
    height, width = (min(SIDE, side) for side in pixels.shape[-2:])
    return F.adaptive_avg_pool2d(pixels[:, picks.to(pixels.device)].flatten(1, 2), (height, width)).flatten(1)


def sample_diversity(pictures: Tensor, prompts: tuple[str, ...]) -> dict[str, Tensor]:
    """Root mean square distance between samples [P, K, D]: of the same prompt, and of different ones: [P] each."""
    groups, each, size = pictures.shape
    flat = pictures.flatten(0, 1)
    apart = torch.cdist(flat, flat, compute_mode="donot_use_mm_for_euclid_dist") / size**0.5
    group = torch.arange(groups).repeat_interleave(each)
    text = torch.tensor([prompts.index(prompt) for prompt in prompts]).repeat_interleave(each)
    same = (group[:, None] == group) & ~torch.eye(len(flat), dtype=torch.bool)
    other = text[:, None] != text
    found = {"diversity": _mean(apart, same, groups)}
    return {**found, "variety": _mean(apart, other, groups)} if other.any() else found


def _mean(apart: Tensor, pairs: Tensor, groups: int) -> Tensor:
    sums, counts = ((x.view(groups, -1).sum(1)) for x in (apart * pairs, pairs.float()))
    return sums / counts
