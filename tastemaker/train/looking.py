"""Looking at a generator in training as it will be used: at its own size, steps and guidance, on the same network."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..config.run import SampleConfig
from ..guidance import unguided
from ..policy import Backbone, Guidance, Policy, Sizable, Steered
from ..randomness import Randomness
from ..types import Facts, Prompts
from .run import LOOK, Run


def viewed(policy: Policy[Any], sample: SampleConfig = SampleConfig()) -> Policy[Any]:
    """The policy as it is used, with what samples have of their own; made anew when the network may be borrowed."""
    model, guidance = unguided(policy.model)
    scale, process = sample.guidance, policy.process
    model = sized(model, sample.height, sample.width)
    if isinstance(model, Steered):
        model, scale = model.steered(scale), None
    if scale is not None:
        guidance = replace(guidance or Guidance(), scale=scale)
    if sample.steps is not None:
        process = process.in_steps(sample.steps)
    guided = process.guide(model, guidance) if guidance and guidance.scale != 1 else model
    return Policy(guided, process, policy.weights)


def sized(model: Backbone, height: int | None, width: int | None) -> Backbone:
    """Of that size; a side that is not given is the model's own."""
    size = (height or model.pixels[2], width or model.pixels[3])
    if size == model.pixels[2:]:
        return model
    if not isinstance(model, Sizable):
        own = "x".join(map(str, model.pixels[2:]))
        raise ValueError(f"the model makes pictures of {own} alone; leave sample.height and sample.width out")
    return model.sized(*size)


def uncompiled(run: Run) -> AbstractContextManager[Any]:
    """Within the block nothing is compiled: another size or batch would change the code that training runs on."""
    return torch.compiler.set_stance("force_eager") if run.engine.config.compile else nullcontext()


@torch.no_grad()
def paint(run: Run, prompts: Prompts, facts: tuple[Facts, ...]) -> Tensor:
    """Pixels of prompts, always from the same noise, on the weights that will be used; as many at a time as fit."""
    count, pieces = run.batch.rollout or len(prompts), []
    with run.engine.computing(), run.shown(), uncompiled(run):
        policy = viewed(run.policy, run.sample)
        for first in range(0, len(prompts), count):
            rows = torch.arange(first, min(first + count, len(prompts)), device=run.engine.device)
            cond = policy.embed(prompts[first : first + count], facts[first : first + count])
            pieces.append(policy.decode(policy.sample(cond, Randomness(run.seed, LOOK, rows)).final))
    return torch.cat(pieces)
