"""What is praised and what is blamed: a picture under control words, or for rewards that read none, under noise."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..core.objective import Context
from ..core.randomness import Randomness
from ..core.types import Metadata, Prompts
from ..processes.gaussian import GaussianProcess


def noise_contrast(
    ctx: Context[GaussianProcess],
    pixels: Tensor,
    prompts: Prompts,
    facts: Sequence[Metadata],
    grain: float,
    turned: Sequence[bool],
) -> tuple[Tensor, Tensor]:
    """What the pictures earn, and what they earn under noise that is the same for all; where turned, the other way."""
    one = Randomness(ctx.rng.seed, ctx.rng.step, torch.zeros_like(ctx.rng.rows[:1]))
    grainy = (pixels + grain * one.normal("grain", *pixels.shape[1:])).clamp(0, 1)
    clear, noisy = (ctx.rubric.score(shown, prompts, facts).total for shown in (pixels, grainy))
    swap = torch.tensor(turned, device=clear.device)
    return torch.where(swap, noisy, clear), torch.where(swap, clear, noisy)


def prompt_contrast(
    ctx: Context[GaussianProcess],
    pixels: Tensor,
    prompts: Prompts,
    facts: Sequence[Metadata],
    told: tuple[str, str],
    turned: Sequence[bool],
) -> tuple[Tensor, Tensor]:
    """What the pictures earn under the first of two templates of a prompt, and under the other; where turned, not."""
    asked = [
        [told[i ^ swap].replace("{prompt}", prompt) for prompt, swap in zip(prompts, turned, strict=True)]
        for i in (0, 1)
    ]
    praised, blamed = (scores.total for scores in ctx.rubric.score_each(pixels, asked, facts))
    return praised, blamed
