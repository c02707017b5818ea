"""ReNO: optimize the initial noise of a few-step generator with the gradient of the reward."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..core.distributions import expand_dims_like
from ..core.policy import Policy
from ..core.randomness import Randomness
from ..core.registry import ConfigError
from ..core.reward import Verifier
from ..core.types import PromptBatch, concatenate, select_rows
from .base import Search, SearchCost, SearchResult, start_candidates
from .noise_search import Candidates


@dataclass(frozen=True)
class ReNO(Search):
    """Nesterov gradient ascent on the initial noise of each sample; the best iterate is the answer.

    The gradient passes through all sampling steps along the ODE, so memory grows with their number: use 1 to 4.
    """

    iterations: int = 50
    lr: float = 5.0
    momentum: float = 0.9
    max_grad_norm: float = 0.1  # of each sample
    norm_coef: float = 0.01  # of the negative log-density of the noise's norm

    def __post_init__(self) -> None:
        positive = (self.lr, self.max_grad_norm)
        if self.iterations < 1 or not all(x > 0 and math.isfinite(x) for x in positive) or not 0 <= self.momentum < 1:
            raise ValueError(
                "expected iterations of at least 1, lr and max_grad_norm above 0 and momentum from 0 to below 1, got "
                f"iterations {self.iterations}, lr {self.lr}, max_grad_norm {self.max_grad_norm} and momentum "
                f"{self.momentum}; correct these settings [TM1629]"
            )

    @torch.no_grad()
    def run(self, policy: Policy[Any], verifier: Verifier, batch: PromptBatch, rng: Randomness) -> SearchResult:
        policy = replace(policy, process=policy.process.deterministic())
        cond, prompts = policy.embed(batch.prompts, batch.metadata), torch.arange(len(batch), device=rng.rows.device)
        best, cost = None, SearchCost(0)
        noise = velocity = torch.zeros(0)
        for k in range(self.iterations):
            rollout = start_candidates(policy, cond, replace(rng, step=rng.step + k))
            with torch.enable_grad():
                start = (noise if k else rollout.start).detach().requires_grad_()
                rollout.set_start(start)
                final = rollout.finish().final
                score = verifier.judge(policy.decode(final), cond.prompts, cond.metadata, 1.0).score
                if not score.requires_grad:
                    raise ConfigError(
                        "--search: reno needs the gradient of the reward, but this verifier has none; choose a "
                        "differentiable reward as --verifier, such as hps, or use --search noise_search [TM1630]"
                    )
                loss = (self.norm_coef * norm_penalty(start) - score).sum()
                (gradient,) = torch.autograd.grad(loss, start)
            norm = gradient.flatten(1).norm(dim=1)
            gradient = gradient * expand_dims_like((self.max_grad_norm / (norm + 1e-6)).clamp(max=1), gradient)
            velocity = self.momentum * velocity + gradient if k else gradient
            noise = start.detach() - self.lr * (gradient + self.momentum * velocity)
            found = Candidates(start.detach(), final.detach(), score.detach())
            if best is not None:
                better = found.score > best.score
                found = select_rows(concatenate([best, found]), prompts + len(batch) * better)
            best, cost = found, cost + SearchCost(rollout.network_calls, len(batch))
        assert best is not None
        return SearchResult(best.final, best.score, cost)


def norm_penalty(noise: Tensor) -> Tensor:
    """Negative log-density of the norm of normal noise [B, ...], up to a constant: [B]."""
    norm: Tensor = noise.flatten(1).norm(dim=1)
    return norm**2 / 2 - (noise[0].numel() - 1) * norm.log()
