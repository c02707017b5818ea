"""MaPO: margin-aware preference optimization without a reference (Hong et al. 2024)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from ..core.objective import Context, Objective, require_settings, rollout_and_score
from ..core.policy import Policy
from ..core.types import Corrupted, Loss, PreferenceBatch, PromptBatch
from ..processes.gaussian import GaussianProcess
from .denoising_likelihood import (
    SampleLikelihood,
    predict_clean,
    prediction_likelihood,
    sample_likelihood,
    velocity_distance,
    velocity_level,
)
from .dpo import NoiseSharing, PreferenceExperience, corrupt_pair, encode_pairs, pair_best_with_worst


def odds_score(error: Tensor, scale: float) -> Tensor:
    """f(e) = c e / (exp(c e) - 1), which falls with the error from 1 at e = 0: [B]."""
    x = scale * error
    safe = torch.where(x > 0, x, 1.0)  # 0 / 0 has neither a value nor a gradient
    # Written with exp(-x), which does not overflow for large errors.
    return torch.where(x > 0, safe * torch.exp(-safe) / -torch.expm1(-safe), 1 - x / 2)


def mapo_loss(
    chosen: Tensor, rejected: Tensor, beta: float, margin_scale: float, error_scale: float, offset: Tensor | float = 0.0
) -> Tensor:
    """e_w - beta log sigmoid(T (f(e_w) - f(e_l) - offset)), of the errors of the chosen and the rejected sample: [B].

    The published margin has no offset. That of the reference is f(e_w) - f(e_l) of its errors.
    """
    margin = margin_scale * (odds_score(chosen, error_scale) - odds_score(rejected, error_scale) - offset)
    return chosen - beta * F.logsigmoid(margin)


def mean_velocity_distance(
    policy: Policy[GaussianProcess],
    predictions: Sequence[Tensor],
    references: Sequence[Tensor],
    noisy: Sequence[Corrupted],
) -> Tensor:
    """Squared distance of the velocities of two networks, mean over the samples of a pair: [B]."""
    distances = [
        velocity_distance(prediction, reference, velocity_level(policy.process.path, each.t))
        for prediction, reference, each in zip(predictions, references, noisy, strict=True)
    ]
    return torch.stack(distances).mean(0).float()


@dataclass(frozen=True, kw_only=True)
class PairObjective(Objective[GaussianProcess, PreferenceBatch | PromptBatch, PreferenceExperience, int]):
    """What offline and online MaPO share: the settings of the loss, and the loss."""

    beta: float = 0.1  # weight of the margin beside the error of the chosen sample
    margin_scale: float = 1000.0  # T in the paper, its number of diffusion timesteps
    error_scale: float = 0.5  # c, `snr_value` in the published code
    noise_sharing: NoiseSharing = "shared"
    num_timesteps: int = 1  # corruptions of each pair
    # Minus the error. output: that of the network's output, as published; others: of predicted clean samples, as in
    # elbo_grpo. Their scale is that of their values, so choose a margin_scale with them.
    likelihood: SampleLikelihood = "output"
    # Compare the margin with that of the reference. Without, it measures which image is easier to predict, and half of
    # the model's own pairs keep their full gradient forever; pairs of real images were published without.
    reference_margin: bool = False
    kl_coef: float = 0.0  # weight of the squared distance of velocities to the reference's
    needs: ClassVar[type] = GaussianProcess

    def __post_init__(self) -> None:
        valid = self.beta >= 0 and min(self.margin_scale, self.error_scale) > 0 and self.num_timesteps >= 1
        expected = "beta of at least 0, scales above 0 and at least one timestep"
        require_settings(self, "beta margin_scale error_scale num_timesteps", valid, expected)
        require_settings(self, "kl_coef", self.kl_coef >= 0, "a number of at least 0")

    def snapshots(self) -> tuple[str, ...]:
        return ("reference",) if self.kl_coef or self.reference_margin else ()

    def without_kl(self) -> Self | None:
        return replace(self, kl_coef=0.0) if self.kl_coef else None

    def parts(self, experience: PreferenceExperience) -> Sequence[int]:
        return range(self.num_timesteps)

    def loss(self, ctx: Context[GaussianProcess], experience: PreferenceExperience, part: int) -> Loss:
        """The loss at one corruption of each pair."""
        policy = ctx.policy
        draw = ctx.epoch * self.num_timesteps + part
        noisy = corrupt_pair(policy, experience, self.noise_sharing, draw)
        samples = experience.chosen, experience.rejected
        offset: Tensor | float = 0.0
        kl: Tensor | None = None
        if self.snapshots():
            with torch.no_grad(), policy.weights.use("reference"):
                references = [predict_clean(policy, experience.cond, each) for each in noisy]
            predictions = [predict_clean(policy, experience.cond, each) for each in noisy]
            chosen, rejected = self._errors(policy, predictions, samples, noisy)
            kl = mean_velocity_distance(policy, predictions, references, noisy)
            if self.reference_margin:
                good, bad = self._errors(policy, references, samples, noisy)
                offset = odds_score(good, self.error_scale) - odds_score(bad, self.error_scale)
        else:
            chosen, rejected = (
                -sample_likelihood(policy, experience.cond, x, each, self.likelihood)
                for x, each in zip(samples, noisy, strict=True)
            )
        rows = mapo_loss(chosen, rejected, self.beta, self.margin_scale, self.error_scale, offset)
        rows = (rows if kl is None else rows + self.kl_coef * kl) * experience.weight
        metrics = {
            "accuracy": (chosen < rejected).float(),
            "margin": (rejected - chosen).detach(),
            "log_likelihood": -chosen.detach(),
            **({} if kl is None else {"kl": kl.detach()}),
        }
        return Loss(rows / self.num_timesteps, metrics)

    def _errors(
        self,
        policy: Policy[GaussianProcess],
        predictions: Sequence[Tensor],
        samples: tuple[Tensor, Tensor],
        noisy: tuple[Corrupted, Corrupted],
    ) -> tuple[Tensor, Tensor]:
        """Errors of the chosen and the rejected samples by predicted clean samples: [B] each."""
        chosen, rejected = (
            -prediction_likelihood(policy.process.path, prediction, x, each, self.likelihood)
            for prediction, x, each in zip(predictions, samples, noisy, strict=True)
        )
        return chosen, rejected


@dataclass(frozen=True, kw_only=True)
class MaPO(PairObjective):
    """MaPO on a data set of preference pairs: fit the chosen sample, and fit it better than the rejected one."""

    prompt_dropout: float = 0.0  # share of pairs without their prompt, so that classifier-free guidance keeps working
    consumes: ClassVar[type] = PreferenceBatch

    def __post_init__(self) -> None:
        super().__post_init__()
        require_settings(self, "prompt_dropout", 0 <= self.prompt_dropout <= 1, "a fraction from 0 to 1")

    def collect(self, ctx: Context[GaussianProcess], batch: PreferenceBatch | PromptBatch) -> PreferenceExperience:
        assert isinstance(batch, PreferenceBatch)  # what it consumes
        return encode_pairs(ctx, batch, self.prompt_dropout)


@dataclass(frozen=True, kw_only=True)
class OnlineMaPO(PairObjective):
    """MaPO on the model's own samples: of each prompt's group, the best is preferred to the worst."""

    group_size: int = 4
    consumes: ClassVar[type] = PromptBatch

    def __post_init__(self) -> None:
        super().__post_init__()
        require_settings(self, "group_size", self.group_size >= 2, "at least 2 samples per prompt to form a pair")

    def experience_per_prompt(self) -> int:
        return 1

    def needs_log_probs(self) -> bool:
        return False

    @torch.no_grad()
    def collect(self, ctx: Context[GaussianProcess], batch: PreferenceBatch | PromptBatch) -> PreferenceExperience:
        assert isinstance(batch, PromptBatch)  # what it consumes
        policy = replace(ctx.policy, process=ctx.policy.process.with_sampled_log_probs())
        trajectory, _, scores = rollout_and_score(replace(ctx, policy=policy), batch, self.group_size)
        return pair_best_with_worst(trajectory, scores.total, self.group_size, ctx.rng)

    def metrics(self, experience: PreferenceExperience) -> dict[str, Tensor]:
        return {"reward/mean": experience.reward, "zero_std_groups": (1 - experience.weight).mean()}
