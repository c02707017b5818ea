"""Samples during training, with the size, steps and guidance of the `sample` section."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..config.schema import SampleConfig
from ..core.policy import Backbone, Guidance, Policy
from ..core.randomness import Randomness
from ..core.types import ImageBatch, Metadata, Prompts
from ..data.image_io import resize_and_center_crop
from ..data.metadata_images import read_metadata_images
from .events import SamplesGenerated
from .run import SAMPLE_STEP, Run

MAX_SOURCES = 3  # of a prompt, that are shown


@torch.no_grad()
def generate_samples(run: Run, step: int) -> SamplesGenerated:
    """Generate and score samples from fixed prompts and fixed noise, with live or EMA weights (`sample.weights`)."""
    batch = run.fixed_prompts(run.sample.count)
    prompts = run.sample.prompts or batch.prompts
    metadata = () if run.sample.prompts else batch.metadata
    pixels = sample_pixels(run, prompts, metadata)
    scores: dict[str, float] = {}
    # With an image dataset, rewards may need the target image, which prompts from `sample.prompts` do not have.
    if not run.sample.prompts or run.objective.consumes is not ImageBatch:
        with run.engine.autocast():
            rewards = run.rubric.pointwise().score(pixels, prompts, metadata).rewards
        scores = {name: reward.mean().item() for name, reward in rewards.items()}
    sources = read_sources(prompts, metadata, *pixels.shape[-2:])
    return SamplesGenerated(step, tuple(prompts), pixels.float().clamp(0, 1).cpu(), scores, sources)


def read_sources(prompts: Prompts, metadata: Sequence[Metadata], height: int, width: int) -> Tensor | None:
    """Return the source images of prompts at a size, at most MAX_SOURCES each: [B, S, 3, H, W]; None without any."""
    images = [(read_metadata_images(entry.get("image")) or ())[:MAX_SOURCES] for entry in metadata]
    count = max(map(len, images), default=0)
    if not count:
        return None
    sources = torch.ones(len(prompts), count, 3, height, width)
    for row, sample_images in enumerate(images):
        for number, image in enumerate(sample_images):
            sources[row, number] = resize_and_center_crop(image[None].float().cpu(), height, width)[0]
    return sources


@torch.no_grad()
def sample_pixels(run: Run, prompts: Prompts, metadata: tuple[Metadata, ...], seed: int | None = None) -> Tensor:
    """Generate pixels [B, F, 3, H, W] from fixed noise, `batch.rollout_batch_size` samples at a time.

    The noise is that of `seed`, by default of the run's seed.
    """
    seed = run.seed if seed is None else seed
    size, chunks = run.batch.rollout_batch_size or len(prompts), []
    with run.engine.autocast(), run.use_sample_weights(), disable_compile(run):
        policy = sampling_policy(run.policy, run.sample)
        for first in range(0, len(prompts), size):
            indices = torch.arange(first, min(first + size, len(prompts)), device=run.engine.device)
            cond = policy.embed(prompts[first : first + size], metadata[first : first + size])
            chunks.append(policy.decode(policy.sample(cond, Randomness(seed, SAMPLE_STEP, indices)).final))
    return torch.cat(chunks)


def sampling_policy(policy: Policy[Any], sample: SampleConfig = SampleConfig()) -> Policy[Any]:
    """Return the policy with the size, steps and guidance of the `sample` section."""
    model, guidance = policy.model.unguided, policy.model.guidance
    scale, process = sample.guidance_scale, policy.process
    model = resize_model(model, sample.height, sample.width)
    distilled = model.with_guidance_scale(scale)
    if distilled is not None:  # the network takes the scale as an input
        model, scale = distilled, None
    if scale is not None:
        guidance = replace(guidance or Guidance(), scale=scale)
    if sample.num_steps is not None:
        process = process.with_num_steps(sample.num_steps)
    guided = process.wrap_guidance(model, guidance) if guidance and guidance.scale != 1 else model
    return Policy(guided, process, policy.weights)


def resize_model(model: Backbone, height: int | None, width: int | None) -> Backbone:
    """Return the model for samples of another size; None stands for the model's own height or width."""
    size = (height or model.pixels[2], width or model.pixels[3])
    return model if size == model.pixels[2:] else model.with_size(*size)


def disable_compile(run: Run) -> AbstractContextManager[Any]:
    """Run compiled networks eagerly within the block, because other shapes would recompile the training graphs."""
    return torch.compiler.set_stance("force_eager") if run.engine.config.compile else nullcontext()
