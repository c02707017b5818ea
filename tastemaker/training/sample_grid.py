"""Samples during training, at the size, steps and guidance of the `sample` section."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..config.schema import SampleConfig
from ..core.guidance import unwrap_guidance
from ..core.policy import Backbone, Guidance, Policy, SupportsDistilledGuidance, SupportsResize
from ..core.randomness import Randomness
from ..core.types import Metadata, Prompts
from .run import SAMPLE_STEP, Run


def sampling_policy(policy: Policy[Any], sample: SampleConfig = SampleConfig()) -> Policy[Any]:
    """Return the policy with the size, steps and guidance of the `sample` section."""
    model, guidance = unwrap_guidance(policy.model)
    scale, process = sample.guidance, policy.process
    model = resize_model(model, sample.height, sample.width)
    if isinstance(model, SupportsDistilledGuidance):
        model, scale = model.steered(scale), None
    if scale is not None:
        guidance = replace(guidance or Guidance(), scale=scale)
    if sample.steps is not None:
        process = process.in_steps(sample.steps)
    guided = process.guide(model, guidance) if guidance and guidance.scale != 1 else model
    return Policy(guided, process, policy.weights)


def resize_model(model: Backbone, height: int | None, width: int | None) -> Backbone:
    """Of that size; a side that is not given is the model's own."""
    size = (height or model.pixels[2], width or model.pixels[3])
    if size == model.pixels[2:]:
        return model
    if not isinstance(model, SupportsResize):
        own = "x".join(map(str, model.pixels[2:]))
        raise ValueError(f"the model makes pictures of {own} alone; leave sample.height and sample.width out")
    return model.sized(*size)


def disable_compile(run: Run) -> AbstractContextManager[Any]:
    """Within the block nothing is compiled: another size or batch would change the code that training runs on."""
    return torch.compiler.set_stance("force_eager") if run.engine.config.compile else nullcontext()


@torch.no_grad()
def sample_pixels(run: Run, prompts: Prompts, facts: tuple[Metadata, ...]) -> Tensor:
    """Pixels of prompts, always from the same noise, on the weights that will be used; as many at a time as fit."""
    count, pieces = run.batch.rollout or len(prompts), []
    with run.engine.computing(), run.shown(), disable_compile(run):
        policy = sampling_policy(run.policy, run.sample)
        for first in range(0, len(prompts), count):
            rows = torch.arange(first, min(first + count, len(prompts)), device=run.engine.device)
            cond = policy.embed(prompts[first : first + count], facts[first : first + count])
            pieces.append(policy.decode(policy.sample(cond, Randomness(run.seed, SAMPLE_STEP, rows)).final))
    return torch.cat(pieces)
