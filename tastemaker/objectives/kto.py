"""KTO: likes and dislikes without pairs (Ethayarajh et al. 2024; Diffusion-KTO, Li et al. 2024)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from ..core.objective import Context, Objective, drop_prompts, require_settings, rollout_and_score
from ..core.policy import Policy, Process
from ..core.randomness import Purpose, Randomness
from ..core.types import Condition, Corrupted, LikeBatch, Loss, PromptBatch, select_rows
from ..processes.gaussian import GaussianProcess
from .denoising_likelihood import (
    SampleLikelihood,
    as_gaussian,
    predict_clean,
    prediction_likelihood,
    sample_likelihood,
    velocity_distance,
    velocity_level,
)

Utility = Literal["kahneman_tversky", "loss_averse", "risk_seeking"]
ReferencePoint = Literal["batch", "mismatched", "zero"]


@dataclass(frozen=True)
class LabeledSamples:
    """Samples that are liked or disliked, with what their gain over the reference is compared with."""

    cond: Condition
    x: Tensor  # [B, ...] in model space
    liked: Tensor  # [B] bool
    weight: Tensor  # [B] 0 for a sample without a label
    rng: Randomness
    reward: Tensor  # [B] 0 for data without rewards
    reference: Tensor  # [B, K] log-likelihood of each corruption under the reference
    reference_point: Tensor  # [B] z, the same for all samples of all ranks

    def __len__(self) -> int:
        return len(self.cond)


def kto_loss(gain: Tensor, reference_point: Tensor, liked: Tensor, beta: float, utility: Utility) -> Tensor:
    """1 - U(beta (g - z)) for a like and 1 - U(-beta (g - z)) for a dislike: [B].

    g is the gain in log-likelihood over the reference. U is the sigmoid (Kahneman and Tversky), log sigmoid (loss
    averse) or x -> -log sigmoid(-x) (risk seeking); the constant 1 is dropped where it is of no use.
    """
    value = torch.where(liked, 1.0, -1.0).to(gain) * beta * (gain - reference_point)
    if utility == "loss_averse":
        return -F.logsigmoid(value)
    if utility == "risk_seeking":
        return F.logsigmoid(-value)
    return 1 - value.sigmoid()


@dataclass(frozen=True, kw_only=True)
class LabelObjective(Objective[Process, LikeBatch | PromptBatch, LabeledSamples, int]):
    """What offline and online KTO share: the settings of the loss, and the loss."""

    beta: float = 1000.0  # of squared errors, as in Diffusion-KTO; about 0.1 for tokens
    utility: Utility = "kahneman_tversky"
    like_weight: float = 1.0
    dislike_weight: float = 1.0
    # z: mean gain of the batch over the reference, that of each sample under the next one's prompt (KTO), or 0.
    reference_point: ReferencePoint = "batch"
    num_timesteps: int = 1  # corruptions of each sample, the same in every epoch
    shared_noise: bool = False  # one timestep and noise for the whole batch
    # Log-likelihood of diffusion models. output: the published one, which sees little of high noise levels on networks
    # that predict noise; adaptive and others: errors of predicted clean samples, as in elbo_grpo, with a beta near 10
    likelihood: SampleLikelihood = "output"
    kl_coef: float = 0.0  # weight of the squared distance of velocities to the reference's, on diffusion models

    def __post_init__(self) -> None:
        weights = self.like_weight, self.dislike_weight
        valid = self.beta > 0 and min(weights) >= 0 and max(weights) > 0 and self.num_timesteps >= 1
        expected = "beta above 0, weights of at least 0 that are not both 0, and at least one timestep"
        require_settings(self, "beta like_weight dislike_weight num_timesteps", valid, expected)
        require_settings(self, "kl_coef", self.kl_coef >= 0, "a number of at least 0")

    def find_problem(self, process: Process, shape: tuple[int, ...]) -> str | None:
        if isinstance(process, GaussianProcess) or (self.likelihood == "output" and not self.kl_coef):
            return None
        return (
            f"objective.likelihood is {self.likelihood} and objective.kl_coef {self.kl_coef}, which compare denoised "
            "samples, but this model generates tokens; set objective.likelihood=output and objective.kl_coef=0 [TM2200]"
        )

    def without_kl(self) -> Self | None:
        return replace(self, kl_coef=0.0) if self.kl_coef else None

    def snapshots(self) -> tuple[str, ...]:
        return ("reference",)

    def parts(self, experience: LabeledSamples) -> Sequence[int]:
        return range(self.num_timesteps)

    def loss(self, ctx: Context[Process], experience: LabeledSamples, part: int) -> Loss:
        """The loss at one corruption. The reference point is that of the weights at the start of the step."""
        noisy = ctx.policy.corrupt(experience.x, experience.rng, draw=part)
        likelihood, kl = self._likelihood_and_kl(ctx.policy, experience.cond, experience.x, noisy)
        gain = likelihood - experience.reference[:, part]
        liked, z = experience.liked, experience.reference_point
        weight = torch.where(liked, self.like_weight, self.dislike_weight) * experience.weight
        rows = weight * kto_loss(gain, z, liked, self.beta, self.utility)
        if kl is not None:
            rows = rows + self.kl_coef * kl
        gain = gain.detach()
        metrics = {
            "accuracy": ((gain > z) == liked).float(),
            "log_ratio": gain,
            "log_ratio/signed": torch.where(liked, gain, -gain),
            "reference_point": z,
            **({} if kl is None else {"kl": kl.detach()}),
        }
        return Loss(rows / self.num_timesteps, metrics)

    def _likelihood_and_kl(
        self, policy: Policy[Process], cond: Condition, x: Tensor, noisy: Corrupted
    ) -> tuple[Tensor, Tensor | None]:
        if not self.kl_coef:
            return sample_likelihood(policy, cond, x, noisy, self.likelihood), None
        with torch.no_grad(), policy.weights.use("reference"):
            reference = predict_clean(as_gaussian(policy), cond, noisy)
        prediction, path = predict_clean(as_gaussian(policy), cond, noisy), as_gaussian(policy).process.path
        distance = velocity_distance(prediction, reference, velocity_level(path, noisy.t)).float()
        return prediction_likelihood(path, prediction, x, noisy, self.likelihood), distance

    def compare_with_reference(
        self, ctx: Context[Process], cond: Condition, x: Tensor, liked: Tensor, rng: Randomness
    ) -> LabeledSamples:
        """Add the reference's log-likelihoods and the reference point, which needs the whole batch of all ranks."""
        if self.shared_noise:
            rng = replace(rng, rows=torch.zeros_like(rng.rows))
        with ctx.policy.weights.use("reference"):
            reference = self._likelihoods(ctx, cond, x, rng)
        z = torch.zeros((), device=reference.device)
        if self.reference_point == "batch":
            z = self._mean_gain(ctx, self._likelihoods(ctx, cond, x, rng) - reference)
        elif self.reference_point == "mismatched":
            other = mismatch_prompts(ctx, cond)
            with ctx.policy.weights.use("reference"):
                before = self._likelihoods(ctx, other, x, rng)
            z = self._mean_gain(ctx, self._likelihoods(ctx, other, x, rng) - before)
        zeros = torch.zeros(len(x), device=reference.device)
        return LabeledSamples(cond, x, liked, zeros + 1, rng, zeros, reference, zeros + z)

    def _likelihoods(self, ctx: Context[Process], cond: Condition, x: Tensor, rng: Randomness) -> Tensor:
        """Log-likelihoods of all corruptions under the current weights, without gradients: [B, K]."""
        policy = ctx.policy

        def likelihood(rows: Tensor, draw: int) -> Tensor:
            chunk = select_rows((cond, x, rng), rows)
            return sample_likelihood(policy, *chunk[:2], policy.corrupt(*chunk[1:], draw=draw), self.likelihood)

        with torch.no_grad():
            columns = [torch.cat([likelihood(r, k) for r in ctx.chunks(len(x))]) for k in range(self.num_timesteps)]
        return torch.stack(columns, 1)

    def _mean_gain(self, ctx: Context[Process], gain: Tensor) -> Tensor:
        """max(0, mean over all samples of all ranks): a scalar."""
        return ctx.comm.gather(gain).mean().clamp(min=0)


def mismatch_prompts(ctx: Context[Process], cond: Condition) -> Condition:
    """The conditions of the next samples of the batch, which may be on another rank."""
    prompts, metadata = ctx.comm.gather_objects(cond.prompts), ctx.comm.gather_objects(cond.metadata)
    following = [(ctx.comm.rank * len(cond) + i + 1) % len(prompts) for i in range(len(cond))]
    return ctx.policy.embed([prompts[i] for i in following], [metadata[i] for i in following] if metadata else ())


@dataclass(frozen=True, kw_only=True)
class KTO(LabelObjective):
    """KTO on a data set of likes and dislikes: raise the likelihood of what is liked, lower that of what is not.

    Gains are compared with a reference point z, so that a like counts most while it gains less than the others.
    """

    prompt_dropout: float = 0.0  # share of samples without their prompt, so that classifier-free guidance keeps working
    consumes: ClassVar[type] = LikeBatch

    def __post_init__(self) -> None:
        super().__post_init__()
        require_settings(self, "prompt_dropout", 0 <= self.prompt_dropout <= 1, "a fraction from 0 to 1")

    @torch.no_grad()
    def collect(self, ctx: Context[Process], batch: LikeBatch | PromptBatch) -> LabeledSamples:
        assert isinstance(batch, LikeBatch)  # what it consumes
        device = ctx.rng.rows.device
        x, liked = ctx.policy.encode(batch.pixels.to(device)), batch.liked.to(device)
        dropped = ctx.host_rng().uniform(Purpose.PROMPT_DROPOUT, 1).flatten() < self.prompt_dropout
        return self.compare_with_reference(
            ctx, ctx.policy.embed(drop_prompts(batch.prompts, dropped)), x, liked, ctx.rng
        )

    def metrics(self, experience: LabeledSamples) -> dict[str, Tensor]:
        return {"liked": experience.liked.float()}


@dataclass(frozen=True, kw_only=True)
class OnlineKTO(LabelObjective):
    """KTO on the model's own samples, which a reward labels."""

    group_size: int = 8
    label: Literal["group_mean", "threshold"] = "group_mean"  # liked: above the mean of its group, or `threshold`
    threshold: float = 0.5
    consumes: ClassVar[type] = PromptBatch

    def __post_init__(self) -> None:
        super().__post_init__()
        valid = self.group_size >= (2 if self.label == "group_mean" else 1)
        require_settings(self, "label group_size", valid, "at least 2 samples per prompt to compare with their mean")

    def needs_log_probs(self) -> bool:
        return False

    @torch.no_grad()
    def collect(self, ctx: Context[Process], batch: LikeBatch | PromptBatch) -> LabeledSamples:
        assert isinstance(batch, PromptBatch)  # what it consumes
        # Labels need no log-probabilities, which some samplers compute in an extra pass.
        policy = replace(ctx.policy, process=ctx.policy.process.with_sampled_log_probs())
        trajectory, rng, scores = rollout_and_score(replace(ctx, policy=policy), batch, self.group_size)
        groups = scores.total.view(-1, self.group_size)
        bound, weight = torch.full_like(groups, self.threshold), torch.ones_like(groups)
        if self.label == "group_mean":
            bound = groups.mean(1, keepdim=True).expand_as(groups)
            weight = (groups.amax(1, keepdim=True) > groups.amin(1, keepdim=True)).float().expand_as(groups)
        liked = (groups > bound).flatten()
        samples = self.compare_with_reference(ctx, trajectory.cond, trajectory.final, liked, rng)
        return replace(samples, reward=scores.total, weight=weight.flatten())

    def metrics(self, experience: LabeledSamples) -> dict[str, Tensor]:
        liked, tied = experience.liked.float(), (1 - experience.weight).mean()
        return {"reward/mean": experience.reward, "liked": liked, "zero_std_groups": tied}
