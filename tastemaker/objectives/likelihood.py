from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ..objective import Context, Objective
from ..policy import Process
from ..randomness import Randomness
from ..types import Condition, Loss, Pictures


@dataclass(frozen=True)
class Captioned:
    cond: Condition
    x: Tensor  # [B, ...] in model space
    rng: Randomness

    def __len__(self) -> int:
        return len(self.cond)


@dataclass(frozen=True)
class Likelihood(Objective[Process, Pictures, Captioned, None]):
    """Pretraining and supervised tuning alike: flow matching, noise, masked and next-token prediction."""

    drop: float = 0.1  # of the captions, so that guidance has something to contrast with
    consumes: ClassVar[type] = Pictures

    def __post_init__(self) -> None:
        if not 0 <= self.drop <= 1:
            raise ValueError(f"'drop' is {self.drop}; expected the share of captions to drop, from 0 to 1")

    @torch.no_grad()
    def collect(self, ctx: Context[Process], batch: Pictures) -> Captioned:
        dropped = (ctx.rng.uniform("drop", 1).flatten() < self.drop).tolist()
        prompts = ["" if gone else prompt for prompt, gone in zip(batch.prompts, dropped, strict=True)]
        pixels = batch.pixels.to(ctx.rng.rows.device)
        return Captioned(ctx.policy.embed(prompts), ctx.policy.encode(pixels), ctx.rng)

    def parts(self, experience: Captioned) -> Sequence[None]:
        return (None,)

    def loss(self, ctx: Context[Process], experience: Captioned, part: None) -> Loss:
        policy, x = ctx.policy, experience.x
        noisy = policy.corrupt(x, experience.rng, draw=ctx.epoch)
        likelihood = policy.likelihood(experience.cond, x, noisy) / policy.process.hidden(noisy)
        return Loss(-likelihood, {"likelihood": likelihood.detach()})
