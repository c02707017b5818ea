"""DPO: direct preference optimization (Rafailov et al. 2023; Diffusion-DPO, Wallace et al. 2023)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from ..core.objective import Context, Objective, drop_prompts, require_settings, rollout_and_score
from ..core.policy import Policy, Process
from ..core.randomness import Purpose, Randomness
from ..core.types import Condition, Corrupted, Loss, PreferenceBatch, PromptBatch, Trajectory, select_rows
from .denoising_likelihood import (
    as_gaussian,
    find_norm_guard_problem,
    norm_guard,
    predict_clean,
    prediction_likelihood,
    velocity_level,
)
from .reward_guidance import RewardGuidanceBatch, check_guidance_name, guidance_loss, make_guidance_batch

NoiseSharing = Literal["shared", "timestep", "independent"]  # of a pair: noise and timestep, timestep only, nothing


@dataclass(frozen=True)
class PreferenceExperience:
    """Pairs of samples of the same prompt, one preferred to the other."""

    cond: Condition
    chosen: Tensor  # [B, ...] in model space
    rejected: Tensor  # [B, ...]
    weight: Tensor  # [B] 0 for a pair without a preference, or of a group that is filtered out
    rng: Randomness
    reward: Tensor  # [B] mean reward of the prompt's samples; 0 for data without rewards
    reward_guidance: RewardGuidanceBatch | None = None
    metrics: dict[str, Tensor] = field(default_factory=dict)  # [B] of the groups that the pairs come from

    def __len__(self) -> int:
        return len(self.cond)


@torch.no_grad()
def encode_pairs(ctx: Context[Process], batch: PreferenceBatch, prompt_dropout: float) -> PreferenceExperience:
    """Encode the images and prompts of a data set of pairs, some of them without their prompt."""
    device = ctx.rng.rows.device
    chosen, rejected = (ctx.policy.encode(pixels.to(device)) for pixels in (batch.chosen, batch.rejected))
    dropped = ctx.host_rng().uniform(Purpose.PROMPT_DROPOUT, 1).flatten() < prompt_dropout
    cond = ctx.policy.embed(drop_prompts(batch.prompts, dropped))
    zeros = torch.zeros(len(batch), device=device)
    return PreferenceExperience(cond, chosen, rejected, zeros + 1, ctx.rng, zeros)


def pair_best_with_worst(
    trajectory: Trajectory, reward: Tensor, group_size: int, rng: Randomness
) -> PreferenceExperience:
    """Of each prompt's group of samples, prefer the best to the worst; a group of equal rewards has weight 0."""
    groups = reward.view(-1, group_size)
    first = torch.arange(len(groups), device=groups.device) * group_size
    best, worst = first + groups.argmax(1), first + groups.argmin(1)
    has_preference = (groups.amax(1) > groups.amin(1)).float()
    cond, final = select_rows(trajectory.cond, best), trajectory.final
    return PreferenceExperience(cond, final[best], final[worst], has_preference, rng, groups.mean(1))


def corrupt_pair(
    policy: Policy[Process], pairs: PreferenceExperience, sharing: NoiseSharing, draw: int
) -> tuple[Corrupted, Corrupted]:
    """Corrupt the chosen and the rejected sample with the same noise, at the same timestep, or independently."""
    chosen = policy.corrupt(pairs.chosen, pairs.rng, draw=2 * draw)
    if sharing == "shared":
        return chosen, policy.corrupt(pairs.rejected, pairs.rng, chosen.t, chosen.noise, draw=2 * draw)
    t = chosen.t if sharing == "timestep" else None
    return chosen, policy.corrupt(pairs.rejected, pairs.rng, t, draw=2 * draw + 1)


def dpo_loss(
    policy: Policy[Process],
    pairs: PreferenceExperience,
    corrupted: tuple[Corrupted, Corrupted],
    beta: float,
    sft_coef: float,
    reference: str = "reference",
    norm_guard_coef: float = 0.0,
) -> Loss:
    """-log sigmoid(beta [log pi/ref(chosen) - log pi/ref(rejected)]) (Rafailov et al., equation 7): [B].

    The log-likelihoods of diffusion and masked models are bounds, at the corruption given. `sft_coef` adds the
    negative log-likelihood of the chosen sample, `norm_guard_coef` the mean penalty of both samples.
    """
    samples = ((pairs.chosen, corrupted[0]), (pairs.rejected, corrupted[1]))
    guard, guard_metrics = torch.zeros_like(pairs.weight), dict[str, Tensor]()
    if norm_guard_coef:
        likelihoods, guard, ratio = guarded_likelihoods(policy, pairs.cond, samples, reference)
        (chosen, reference_chosen), (rejected, reference_rejected) = likelihoods
        guard_metrics["velocity_norm_ratio"] = ratio
    else:
        with policy.weights.use(reference):
            reference_chosen, reference_rejected = (policy.likelihood(pairs.cond, x, noisy) for x, noisy in samples)
        chosen, rejected = (policy.likelihood(pairs.cond, x, noisy) for x, noisy in samples)
    margin = beta * ((chosen - reference_chosen) - (rejected - reference_rejected))
    rows = -F.logsigmoid(margin) - sft_coef * chosen / policy.process.count_hidden(corrupted[0])
    metrics = {
        "accuracy": (margin > 0).float(),
        "margin": margin.detach(),
        "log_ratio/chosen": (chosen - reference_chosen).detach(),
        **guard_metrics,
    }
    return Loss((rows + norm_guard_coef * guard) * pairs.weight, metrics)


def guarded_likelihoods(
    policy: Policy[Process],
    cond: Condition,
    samples: tuple[tuple[Tensor, Corrupted], tuple[Tensor, Corrupted]],
    reference: str,
) -> tuple[list[tuple[Tensor, Tensor]], Tensor, Tensor]:
    """Log-likelihoods of both samples under the policy and the reference, and the penalty of NormGuard: [B] each.

    All come from the same predictions, so that the penalty costs no network call. The last value is the ratio of norms.
    """
    gaussian = as_gaussian(policy)
    path = gaussian.process.path
    with torch.no_grad(), policy.weights.use(reference):
        references = [predict_clean(gaussian, cond, noisy) for _, noisy in samples]
    likelihoods, guards, ratios = [], [], []
    for (x, noisy), expected in zip(samples, references, strict=True):
        prediction = predict_clean(gaussian, cond, noisy)
        live, frozen = (prediction_likelihood(path, each, x, noisy, "output") for each in (prediction, expected))
        likelihoods.append((live, frozen))
        guard, ratio = norm_guard(noisy, x, prediction, expected, velocity_level(path, noisy.t))
        guards.append(guard.float())
        ratios.append(ratio.float())
    return likelihoods, (guards[0] + guards[1]) / 2, (ratios[0] + ratios[1]) / 2


@dataclass(frozen=True)
class DPO(Objective[Process, PreferenceBatch, PreferenceExperience, int]):
    """DPO on a data set of preference pairs.

    Diffusion-DPO writes beta/2 where this has beta: its 5000 is 2500 here. With `reward_guidance_coef` the log reward
    of a judge on the model's own samples of the same prompts is maximized too (PARM-guided DPO).
    """

    beta: float = 0.1
    sft_coef: float = 0.0  # weight of the negative log-likelihood of the chosen sample
    noise_sharing: NoiseSharing = "shared"
    num_timesteps: int = 1  # corruptions of each pair
    prompt_dropout: float = 0.0  # share of pairs without their prompt, so that classifier-free guidance keeps working
    # Weight of the squared excess of the velocity's norm over the reference's, on diffusion models
    norm_guard_coef: float = 0.0
    reward_guidance_coef: float = 0.0  # weight of -log reward
    reward_guidance_name: str = ""  # name of that reward; the weighted sum of all if empty
    reward_guidance_samples: int = 2  # per prompt, if guided: the first is scored against the mean of the others
    consumes: ClassVar[type] = PreferenceBatch

    def __post_init__(self) -> None:
        valid = self.beta > 0 and self.sft_coef >= 0 and self.num_timesteps >= 1
        expected = "beta above 0, sft_coef of at least 0 and at least one timestep"
        require_settings(self, "beta sft_coef num_timesteps", valid, expected)
        if not 0 <= self.prompt_dropout <= 1:
            raise ValueError(
                f"'prompt_dropout': expected a fraction from 0 to 1, got {self.prompt_dropout}; correct "
                "'prompt_dropout' [TM303]"
            )
        require_settings(self, "norm_guard_coef", self.norm_guard_coef >= 0, "a number of at least 0")
        valid = self.reward_guidance_coef >= 0 and self.reward_guidance_samples >= 2
        settings = "reward_guidance_coef reward_guidance_samples"
        require_settings(self, settings, valid, "a coefficient of at least 0 and at least two samples")
        check_guidance_name(self.reward_guidance_name, self.reward_guidance_coef)

    def find_problem(self, process: Process, shape: tuple[int, ...]) -> str | None:
        return find_norm_guard_problem(process, self.norm_guard_coef)

    def samples_per_prompt(self) -> int:
        return self.reward_guidance_samples if self.reward_guidance_coef else 0

    def snapshots(self) -> tuple[str, ...]:
        return ("reference",)

    @torch.no_grad()
    def collect(self, ctx: Context[Process], batch: PreferenceBatch) -> PreferenceExperience:
        pairs = encode_pairs(ctx, batch, self.prompt_dropout)
        if not self.reward_guidance_coef:
            return pairs
        samples, prompts = self.reward_guidance_samples, PromptBatch(tuple(batch.prompts), ({},) * len(batch))
        trajectory, _, scores = rollout_and_score(ctx, prompts, samples)
        guidance = make_guidance_batch(trajectory, scores, self.reward_guidance_name, samples)
        return replace(pairs, reward=scores.total.view(-1, samples).mean(1), reward_guidance=guidance)

    def metrics(self, experience: PreferenceExperience) -> dict[str, Tensor]:
        return {"reward/mean": experience.reward} if self.reward_guidance_coef else {}

    def parts(self, experience: PreferenceExperience) -> Sequence[int]:
        guidance_parts = len(experience.reward_guidance.trajectory.segments) if experience.reward_guidance else 0
        return range(self.num_timesteps + guidance_parts)

    def loss(self, ctx: Context[Process], experience: PreferenceExperience, part: int) -> Loss:
        """The DPO loss at one corruption for the first `num_timesteps` parts, then the reward guidance by segment."""
        if part >= self.num_timesteps:
            assert experience.reward_guidance is not None  # or `parts` would end before
            loss = guidance_loss(ctx.policy, experience.reward_guidance, part - self.num_timesteps)
            return Loss(self.reward_guidance_coef * loss.rows, loss.metrics)
        corrupted = corrupt_pair(ctx.policy, experience, self.noise_sharing, ctx.epoch * self.num_timesteps + part)
        loss = dpo_loss(
            ctx.policy, experience, corrupted, self.beta, self.sft_coef, norm_guard_coef=self.norm_guard_coef
        )
        return Loss(loss.rows / self.num_timesteps, loss.metrics)
