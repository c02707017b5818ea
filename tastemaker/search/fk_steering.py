"""FK (Feynman-Kac) steering: particles are resampled by the rewards of their previews while they are generated."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from ..core.errors import RewardError
from ..core.policy import Policy, Rollout
from ..core.randomness import Purpose, Randomness
from ..core.registry import ConfigError
from ..core.reward import Verifier
from ..core.types import PromptBatch
from .base import Search, SearchCost, SearchResult, check_candidates, start_candidates

Potential = Literal["diff", "max", "add", "rt"]


@dataclass(frozen=True)
class FKSteering(Search):
    """n particles per prompt; those with promising previews are copied, and copies get new noise.

    With potentials G_t, the weights of the particles are products of G_t since the last resampling. The last potential
    is exp(lambda r(x0)) divided by all earlier ones, so that the finished particles with their weights are a sample of
    p(x0) exp(lambda r(x0)), whichever potential is chosen. Costs as many network calls as best-of-N.
    """

    n: int = 4
    # exp of lambda times: diff: r - last r; max: highest r so far; add: sum of r so far; rt: r
    potential: Potential = "diff"
    reward_scale: float = 10.0  # lambda; about 1 / the difference of rewards that matters
    resample_at: tuple[float, ...] = (0.2, 0.4, 0.6, 0.8)  # progress at which previews are scored
    ess_threshold: float = 0.5  # resample if the effective sample size is below this share of n; 1: always
    answer: Literal["best", "sample"] = "best"  # of the finished particles: highest reward, or drawn by weight

    def __post_init__(self) -> None:
        check_candidates(self.n)
        valid_scale = self.reward_scale > 0 and math.isfinite(self.reward_scale)
        if not valid_scale or not 0 < self.ess_threshold <= 1:
            raise ValueError(
                "expected reward_scale above 0 and ess_threshold above 0 and at most 1, got reward_scale "
                f"{self.reward_scale} and ess_threshold {self.ess_threshold}; correct these settings [TM1621]"
            )
        if not self.resample_at or not all(0 < progress < 1 for progress in self.resample_at):
            raise ValueError(
                f"'resample_at': expected numbers between 0 and 1, got {list(self.resample_at)}; write for example "
                "resample_at: [0.25, 0.5, 0.75] [TM1622]"
            )

    @torch.no_grad()
    def run(self, policy: Policy[Any], verifier: Verifier, batch: PromptBatch, rng: Randomness) -> SearchResult:
        if not policy.process.stochastic:
            raise ConfigError(
                "--search: fk_steering copies samples, so the sampler must draw noise at every step, but this sampler "
                "is deterministic; set process.dynamics.type to flow_sde (flow models) or ddim (others), or use "
                "--search noise_search or best_of_n [TM1623]"
            )
        cond, draws = policy.embed(batch.prompts, batch.metadata).repeat(self.n), rng.repeat(self.n)
        rollout = start_candidates(policy, cond, draws)
        rollout.reseed(draws)  # refuses rollouts that cannot, before a network call
        device = rng.rows.device
        particles = ParticleWeights(self.potential, self.reward_scale, (len(batch), self.n), device)
        first = torch.arange(len(batch), device=device)[:, None] * self.n
        rollout.step()
        steps, due = 1, self.resampling_steps(round(1 / rollout.progress), rollout.stochastic_until)
        while rollout.progress < 1:
            if steps in due:
                particles.update(self._score(policy, verifier, rollout))
                uniform = rng.uniform(Purpose.RESAMPLING, 1, draw=steps).flatten()
                rows = particles.resample(uniform, self.ess_threshold * self.n)
                rollout.select((first + rows).flatten())
                rollout.reseed(draws)  # copies get noise of their own
            rollout.step()
            steps += 1
        reward = self._score(policy, verifier, rollout)
        particles.finish(reward)
        chosen = reward.argmax(1)
        if self.answer == "sample":
            chosen = draw_index(particles.log_weight, rng.uniform(Purpose.RESAMPLING, 1, draw=0).flatten())
        best = first.flatten() + chosen
        cost = SearchCost(rollout.network_calls, (len(due) + 1) * len(cond))
        return SearchResult(rollout.preview()[best], reward.flatten()[best], cost)

    def resampling_steps(self, num_steps: int, stochastic_until: float) -> frozenset[int]:
        """After which of `num_steps` steps particles are compared: not after the last step that draws noise."""
        steps = {max(1, math.ceil(progress * num_steps - 1e-9)) for progress in self.resample_at}
        due = frozenset(step for step in steps if step < stochastic_until * num_steps - 1e-9)
        if not due:
            raise ConfigError(
                f"--search: fk_steering never resamples, because after the progress of {min(self.resample_at):g} none "
                f"of the {num_steps} sampling steps draws noise; raise process.num_steps, remove process.window, or "
                "lower 'resample_at' [TM1624]"
            )
        return due

    def _score(self, policy: Policy[Any], verifier: Verifier, rollout: Rollout) -> Tensor:
        """Rewards of the current previews: [prompts, n]."""
        pixels, cond = policy.decode(rollout.preview()), rollout.cond
        score = verifier.judge(pixels, cond.prompts, cond.metadata, rollout.progress).score
        if not bool(score.isfinite().all()):
            raise RewardError(
                "--search: the verifier of fk_steering returned a score that is not finite, by which particles "
                "cannot be weighted; choose another reward as --verifier [TM1625]"
            )
        return score.view(-1, self.n).to(rollout.start.device)


class ParticleWeights:
    """Log weights of the particles of each prompt, and what the potential remembers of their ancestors."""

    def __init__(
        self, potential: Potential, reward_scale: float, shape: tuple[int, int], device: torch.device | None = None
    ) -> None:
        self.potential, self.reward_scale = potential, reward_scale
        self.log_weight = torch.zeros(shape, dtype=torch.float64, device=device)  # [prompts, n] since resampling
        self.log_potentials = torch.zeros_like(self.log_weight)  # sum over all ancestors
        # The last, highest or summed reward. A maximum starts at -inf: 0 would hide negative rewards.
        self.memory = torch.full_like(self.log_weight, -torch.inf if potential == "max" else 0.0)

    def update(self, reward: Tensor) -> None:
        """Multiply the potentials of previews with rewards [prompts, n] into the weights."""
        reward, last = reward.double(), self.memory
        if self.potential == "max":
            reward = torch.maximum(last, reward)
        elif self.potential == "add":
            reward = last + reward
        self.memory = reward
        log_potential = self.reward_scale * (reward - last if self.potential == "diff" else reward)
        self.log_weight = self.log_weight + log_potential
        self.log_potentials = self.log_potentials + log_potential

    def finish(self, reward: Tensor) -> None:
        """Multiply the last potential into the weights, after which all potentials multiply to exp(lambda r(x0))."""
        log_potential = self.reward_scale * reward.double() - self.log_potentials
        self.log_weight = self.log_weight + log_potential
        self.log_potentials = self.log_potentials + log_potential

    def resample(self, uniform: Tensor, min_ess: float) -> Tensor:
        """Resample prompts whose effective sample size is below `min_ess`: the particle that continues in each place.

        `uniform` is one number in [0, 1) per prompt. Weights are 1 again after resampling; other prompts keep theirs.
        """
        due = effective_sample_size(self.log_weight) < min_ess  # [prompts]
        places = torch.arange(self.log_weight.shape[1], device=uniform.device).expand_as(self.log_weight)
        rows = torch.where(due[:, None], systematic_resampling(self.log_weight, uniform), places)
        self.log_weight = torch.where(due[:, None], torch.zeros_like(self.log_weight), self.log_weight)
        self.memory, self.log_potentials = self.memory.gather(1, rows), self.log_potentials.gather(1, rows)
        return rows


def effective_sample_size(log_weight: Tensor) -> Tensor:
    """(sum of w)^2 / sum of w^2, from 1 to n, of log weights [prompts, n]: [prompts]."""
    weight = log_weight.softmax(1)
    return 1 / (weight**2).sum(1)


def systematic_resampling(log_weight: Tensor, uniform: Tensor) -> Tensor:
    """Particles [prompts, n] that continue: particle i is copied floor(n w_i) or ceil(n w_i) times, n w_i on average.

    One uniform number in [0, 1) per prompt places n equidistant points on the cumulative weights.
    """
    n = log_weight.shape[1]
    points = (torch.arange(n, device=uniform.device) + uniform.double()[:, None]) / n
    return torch.searchsorted(_cumulative_weights(log_weight), points, right=True)


def draw_index(log_weight: Tensor, uniform: Tensor) -> Tensor:
    """One particle per prompt, drawn in proportion to its weight: [prompts]."""
    return torch.searchsorted(_cumulative_weights(log_weight), uniform.double()[:, None], right=True).flatten()


def _cumulative_weights(log_weight: Tensor) -> Tensor:
    """Cumulative normalized weights [prompts, n]; the last is exactly 1, so that no point lies above it."""
    cumulative = log_weight.double().softmax(1).cumsum(1)
    return cumulative / cumulative[:, -1:]
