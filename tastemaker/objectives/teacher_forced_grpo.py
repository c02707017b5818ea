"""GRPO with teacher forcing for autoregressive image models, as in LlamaGen-GRPO and VA-pi.

Every token of a sample is drawn given the tokens of a training image before it, not those of the sample. All samples of
an image share that context, so one network call draws a whole group and one call scores it.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import ClassVar, Literal, Self

import torch
import torch.nn.functional as F
from pydantic import PositiveInt
from torch import Tensor

from ..core.distributions import TokenDistribution, top_k_top_p_filter
from ..core.group_selection import GroupFilter
from ..core.guidance import scoring_model
from ..core.objective import Context, Objective, drop_prompts, finish_in_order, require_settings
from ..core.policy import Policy
from ..core.randomness import Purpose, Randomness
from ..core.reward import PendingScores, Scores
from ..core.types import Condition, ImageBatch, Loss, Segment, concatenate, select_rows
from ..data.image_io import resize_area
from ..processes.autoregressive import AutoregressiveProcess, make_decoder
from .advantages import filter_weights, group_advantages
from .ppo import clipped_surrogate, k3_estimate

LLAMAGEN_PROMPT_DROPOUT = 0.1  # share of conditions that LlamaGen's network drops in training mode


@dataclass(frozen=True)
class TeacherForcedSamples:
    """A group of token sequences around each training image, with rewards and advantages."""

    cond: Condition
    clean: Tensor  # [B, K] tokens of the training image
    context: Tensor  # [B, 1 or G, K] tokens that the network reads, shared by the group or of each sample
    samples: Tensor  # [B, G, K]
    log_prob: Tensor  # [B, G, K] under the weights that sampled
    rng: Randomness
    reward: Tensor  # [B, G]
    advantage: Tensor  # [B, G]
    rewards: dict[str, Tensor]  # [B, G] of each reward
    offset: Tensor | None = None  # [B] first sample of the row in its group, if groups are split over several rows
    weight: Tensor | None = None  # [B, G] of the samples' losses: 0 in groups that are filtered out; 1 if not given

    def __len__(self) -> int:
        return len(self.cond)

    def to_segment(self, mask: Tensor) -> Segment:
        """All samples as the actions of one segment; `mask` [B, G, K] selects the tokens that count in the loss."""
        tokens, log_prob = self.samples.flatten(0, 1), self.log_prob.flatten(0, 1)
        ones = torch.ones_like(log_prob[:, 0])
        return Segment(ones, 0 * ones, tokens, tokens, log_prob, mask.flatten(0, 1))

    def metrics(self, group_size: int | None = None) -> dict[str, Tensor]:
        """Rewards, and which groups have equal rewards; a group is a row unless its size is given."""
        groups = self.reward.view(-1, group_size or self.reward.shape[1])
        zero_std = (groups.amax(1) - groups.amin(1) < 1e-8).float()
        rewards = {f"rewards/{name}": reward for name, reward in self.rewards.items()}
        kept = {} if self.weight is None else {"kept_groups": (self.weight > 0).float()}
        return {"reward/mean": self.reward, "zero_std_groups": zero_std, **kept, **rewards}


@dataclass(frozen=True)
class TeacherForcedGRPO(Objective[AutoregressiveProcess, ImageBatch, TeacherForcedSamples, None]):
    """GRPO on token sequences drawn with teacher forcing; with token noise and a cross-entropy term it is VA-pi.

    Rewards find the training image in the metadata entry `target`.
    """

    group_size: int = 8
    clip_range: float = 1e-4  # as published; VA-pi has 0.2
    clip_range_high: float | None = None  # upper clip range; clip_range if not given
    kl_coef: float = 0.0  # weight of the k3 estimate of the KL to the reference
    ce_coef: float = 0.0  # weight of the cross-entropy of the image's own tokens, a regularizer
    token_noise: float = 0.0  # share of context tokens replaced by random codes
    own_token_ratio: float = 0.0  # share of context tokens that are the sample's own; needs token-by-token sampling
    token_dropout: float = 0.0  # share of a sample's tokens left out of its loss, drawn at every step
    prompt_dropout: float | None = None  # share of conditions dropped; default 0, or 0.1 with emulate_bugs: [dropout]
    latent_reward_weight: float = 0.0  # weight of the cosine between token embeddings and the encoder's output
    advantage_clip: float = 5.0
    unbiased_std: bool = True  # divide the variance of a group by n - 1
    advantage_eps: float = 1e-8  # added to standard deviations
    filter_groups: GroupFilter | None = None  # which groups train; all if not given
    # Bugs of the first LlamaGen trainer, for comparison; both make the first ratios differ from 1.
    emulate_bugs: tuple[Literal["sampled_context", "dropout"], ...] = ()
    # Samples of an image that one network call of an update scores; default the whole group. Minibatches and
    # micro-batches count these calls, so that a smaller number allows updates on fewer samples than one group.
    samples_per_call: PositiveInt | None = None
    needs: ClassVar[type] = AutoregressiveProcess
    needs_stochastic: ClassVar[bool] = True
    consumes: ClassVar[type] = ImageBatch

    def __post_init__(self) -> None:
        if self.group_size < 2:
            raise ValueError(
                "'group_size': expected at least 2 samples per image, because the samples are compared with each "
                f"other, got {self.group_size}; raise 'group_size' [TM323]"
            )
        if self.group_size % (self.samples_per_call or 1):
            raise ValueError(
                f"'samples_per_call' is {self.samples_per_call}, which does not divide 'group_size' {self.group_size}; "
                "choose a divisor, or leave it out"
                " [TM860]"
            )
        high = self.clip_range if self.clip_range_high is None else self.clip_range_high
        positive = min(self.clip_range, high, self.advantage_clip) > 0
        require_settings(self, "clip_range clip_range_high advantage_clip", positive, "all of them above 0")
        weighted = min(self.kl_coef, self.ce_coef, self.latent_reward_weight) >= 0
        require_settings(self, "kl_coef ce_coef latent_reward_weight", weighted, "weights of at least 0")
        shares = (self.token_noise, self.own_token_ratio, self.prompt_dropout or 0.0, self.token_dropout)
        valid = min(shares) >= 0 and max(shares) <= 1 and self.token_dropout < 1
        names = "token_noise own_token_ratio prompt_dropout token_dropout"
        require_settings(self, names, valid, "shares from 0 to 1, and token_dropout below 1")
        if "sampled_context" in self.emulate_bugs and (self.ce_coef or self.token_noise or self.own_token_ratio):
            raise ValueError(
                "'emulate_bugs': sampled_context ignores the image, so it cannot be combined with image losses; "
                "set ce_coef, token_noise and own_token_ratio to 0 [TM324]"
            )

    def experience_per_prompt(self) -> int:
        return self.group_size // self.samples_per_row()

    def samples_per_row(self) -> int:
        return self.samples_per_call or self.group_size

    def samples_per_prompt(self) -> int:
        return self.group_size

    def rollout_network_calls(self, each: int) -> int:
        return self.group_size * each if self.own_token_ratio else 1  # the samples of an image share the context

    def snapshots(self) -> tuple[str, ...]:
        return ("reference",) if self.kl_coef else ()

    def without_kl(self) -> Self | None:
        return replace(self, kl_coef=0.0) if self.kl_coef else None

    @torch.no_grad()
    def collect(self, ctx: Context[AutoregressiveProcess], batch: ImageBatch) -> TeacherForcedSamples:
        images = max(1, (ctx.rollout_batch_size or len(batch) * self.group_size) // self.group_size)
        chunks = torch.split(torch.arange(len(batch)), images)
        started = (self._sample(ctx, select_rows(batch, rows), select_rows(ctx.rng, rows)) for rows in chunks)
        with ctx.rubric.prioritize_sampling(ctx.rng.rows.device) if ctx.overlap_rewards else nullcontext():
            samples = concatenate([self._with_scores(*each) for each in finish_in_order(ctx, started)])
        weight = filter_weights(ctx, samples.reward.flatten(), self.group_size, self.filter_groups)
        if weight is not None:
            samples = replace(samples, weight=weight.view_as(samples.reward))
        return split_groups(samples, self.samples_per_call) if self.samples_per_call else samples

    def _sample(
        self, ctx: Context[AutoregressiveProcess], batch: ImageBatch, rng: Randomness
    ) -> tuple[TeacherForcedSamples, PendingScores]:
        """Samples without rewards, apart from that of the latents, and the scores that are being computed."""
        policy, (_, _, height, width) = ctx.policy, ctx.policy.model.pixels
        pixels = resize_area(batch.pixels.to(rng.rows.device), height, width)
        prompts: Sequence[str] = batch.prompts
        if "dropout" not in self.emulate_bugs:
            prompts = drop_prompts(prompts, prompt_dropout_mask(rng, self.prompt_dropout or 0))
        cond, clean = policy.embed(prompts), policy.encode(pixels)
        given = replace_tokens_randomly(policy, cond, clean, rng, self.token_noise) if self.token_noise else clean
        tokens, context, log_prob = sample_group(policy, cond, given, rng, self.group_size, self.own_token_ratio)
        scores = start_reconstruction_scores(ctx, batch, tokens, pixels)
        latent = {"latent": latent_similarity(policy, tokens, pixels)} if self.latent_reward_weight else {}
        none = log_prob.new_zeros(tokens.shape[:2])
        return TeacherForcedSamples(cond, clean, context, tokens, log_prob, rng, none, none, latent), scores

    def _with_scores(self, samples: TeacherForcedSamples, scores: Scores) -> TeacherForcedSamples:
        """The samples with their rewards and advantages."""
        reward = scores.total.view(-1, self.group_size)
        rewards = {name: each.view(-1, self.group_size) for name, each in scores.rewards.items()}
        for latent in samples.rewards.values():
            reward = reward + self.latent_reward_weight * latent
        advantage = group_advantages(reward.flatten(), self.group_size, self.unbiased_std, self.advantage_eps)
        advantage = advantage.clamp(-self.advantage_clip, self.advantage_clip).view_as(reward)
        return replace(samples, reward=reward, advantage=advantage, rewards={**rewards, **samples.rewards})

    def metrics(self, experience: TeacherForcedSamples) -> dict[str, Tensor]:
        return experience.metrics(self.group_size)

    def parts(self, experience: TeacherForcedSamples) -> Sequence[None]:
        return (None,)

    def loss(self, ctx: Context[AutoregressiveProcess], experience: TeacherForcedSamples, part: None) -> Loss:
        """The clipped GRPO loss with KL penalty over all tokens of a group, minus ce_coef times the log-likelihood."""
        reference = None
        if self.kl_coef:
            with ctx.policy.weights.use("reference"):
                reference, _ = self._log_probs(ctx, experience)
        log_prob, log_likelihood = self._log_probs(ctx, experience)
        segment = experience.to_segment(self._token_mask(experience, ctx.epoch))
        objective, metrics = clipped_surrogate(
            log_prob, segment, experience.advantage.flatten(), self.clip_range, self.clip_range_high
        )
        if reference is not None:
            kl = k3_estimate(log_prob, reference)
            objective, metrics["kl"] = objective - self.kl_coef * kl, kl.mean(1).detach()
        if self.ce_coef:
            metrics["log_likelihood"] = log_likelihood.detach()
        per_sample = (objective * segment.mask).sum(1) / segment.mask.sum(1)
        per_sample = per_sample.view(experience.samples.shape[:2])
        group_mean = (per_sample if experience.weight is None else per_sample * experience.weight).mean(1)
        return Loss(-group_mean - self.ce_coef * log_likelihood, metrics)

    def _token_mask(self, experience: TeacherForcedSamples, epoch: int) -> Tensor:
        """Which tokens count in the loss: [B, G, K]. Drawn for whole groups, so it does not depend on their split."""
        samples, offset = experience.samples, experience.offset
        if offset is None or not self.token_dropout:
            return sample_token_mask(experience.rng, samples, self.token_dropout, epoch)
        group = samples.new_empty(len(samples), self.group_size, samples.shape[2])
        mask = sample_token_mask(experience.rng, group, self.token_dropout, epoch)
        index = offset[:, None] + torch.arange(samples.shape[1], device=offset.device)
        return mask.gather(1, index[..., None].expand_as(samples))

    def _log_probs(
        self, ctx: Context[AutoregressiveProcess], experience: TeacherForcedSamples
    ) -> tuple[Tensor, Tensor]:
        """Log-probs of the sampled tokens [B * G, K], and the mean log-prob of the image's own tokens [B]."""
        cond = experience.cond
        if "dropout" in self.emulate_bugs and torch.is_grad_enabled():
            p = LLAMAGEN_PROMPT_DROPOUT if self.prompt_dropout is None else self.prompt_dropout
            prompts = drop_prompts(cond.prompts, prompt_dropout_mask(experience.rng, p, ctx.epoch))
            cond = ctx.policy.embed(prompts, cond.metadata)
        context = experience.samples if "sampled_context" in self.emulate_bugs else experience.context
        log_probs, log_likelihood = compute_log_probs(ctx.policy, cond, context, experience.samples, experience.clean)
        return log_probs.flatten(0, 1), log_likelihood


def split_groups(samples: TeacherForcedSamples, size: int) -> TeacherForcedSamples:
    """Spread the samples of each image over adjacent rows of `size` samples; rewards and advantages stay the same."""
    parts = samples.samples.shape[1] // size
    rows = torch.arange(len(samples)).repeat_interleave(parts)
    offset = size * torch.arange(parts, device=samples.samples.device).repeat(len(samples))

    def split(x: Tensor) -> Tensor:
        return x.reshape(-1, size, *x.shape[2:])

    shared = samples.context.shape[1] == 1
    return TeacherForcedSamples(
        cond=select_rows(samples.cond, rows),
        clean=select_rows(samples.clean, rows),
        context=select_rows(samples.context, rows) if shared else split(samples.context),
        samples=split(samples.samples),
        log_prob=split(samples.log_prob),
        rng=select_rows(samples.rng, rows),
        reward=split(samples.reward),
        advantage=split(samples.advantage),
        rewards={name: split(reward) for name, reward in samples.rewards.items()},
        offset=offset,
        weight=None if samples.weight is None else split(samples.weight),
    )


def teacher_forced_distribution(
    policy: Policy[AutoregressiveProcess], cond: Condition, context: Tensor
) -> TokenDistribution:
    """The distribution of each token given the tokens of `context` [B, K] before it, as actions are scored."""
    t, ones = torch.ones(len(context), device=context.device), torch.ones_like(context)
    segment = Segment(t, 0 * t, context, context, ones, ones)
    return policy.process.action_distribution(policy.model, cond, segment)


def sample_group(
    policy: Policy[AutoregressiveProcess],
    cond: Condition,
    given: Tensor,
    rng: Randomness,
    group_size: int,
    own_token_ratio: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Samples [B, G, K] around the tokens `given` [B, K], their context [B, C, K] and log-probs [B, G, K].

    C is 1 if all samples read the given tokens, and G if each reads a share `own_token_ratio` of its own.
    """
    uniform = rng.uniform(Purpose.TOKEN, group_size, given.shape[1])
    if not own_token_ratio:
        distribution = teacher_forced_distribution(policy, cond, given)
        tokens = sample_tokens(policy.process, distribution, uniform)
        return tokens, given[:, None], distribution.log_probs(tokens)
    own = rng.uniform(Purpose.OWN_TOKEN, given.shape[1]) < own_token_ratio  # the same positions in the whole group
    cond = cond.repeat(group_size)
    given, own = (x.repeat_interleave(group_size, 0) for x in (given, own))
    tokens, context = sample_with_mixed_context(policy, cond, given, own, uniform.flatten(0, 1))
    log_prob = teacher_forced_distribution(policy, cond, context).log_prob(tokens)
    return tokens.view(uniform.shape), context.view(uniform.shape), log_prob.view(uniform.shape)


def sample_tokens(process: AutoregressiveProcess, distribution: TokenDistribution, uniform: Tensor) -> Tensor:
    """Draw a token for each uniform number [B, G, K] by inverting the cumulative distribution: [B, G, K]."""
    filtered = top_k_top_p_filter(distribution.logits, process.top_k, process.top_p)
    cumulative = filtered.softmax(-1).cumsum(-1)  # [B, K, V]
    target = uniform.transpose(1, 2) * cumulative[..., -1:]
    tokens = torch.searchsorted(cumulative, target.contiguous(), right=True).clamp(max=cumulative.shape[-1] - 1)
    return tokens.transpose(1, 2).contiguous()


def sample_with_mixed_context(
    policy: Policy[AutoregressiveProcess], cond: Condition, given: Tensor, own: Tensor, uniform: Tensor
) -> tuple[Tensor, Tensor]:
    """Sample token by token, reading the sampled token where `own` is true and the given one elsewhere.

    Returns the samples and the context that was read; everything is [B, K].
    """
    model, cond = scoring_model(policy.model, cond)  # sample from the distribution that will score the tokens
    decoder, context = make_decoder(model, cond, uniform, policy.process.sampler), given.clone()
    for k in range(given.shape[1]):
        if k:
            decoder.replace_last(context[:, k - 1])
        decoder.decode_next()
        context[:, k] = torch.where(own[:, k], decoder.ids[:, k], given[:, k])
    return decoder.ids, context


def compute_log_probs(
    policy: Policy[AutoregressiveProcess], cond: Condition, context: Tensor, tokens: Tensor, clean: Tensor
) -> tuple[Tensor, Tensor]:
    """Log-probs of tokens [B, G, K] given contexts [B, C, K], and the mean log-prob of the clean tokens: [B]."""
    batch, contexts, length = context.shape
    distribution = teacher_forced_distribution(policy, cond.repeat(contexts), context.flatten(0, 1))
    samples = tokens.view(batch * contexts, -1, length)
    own = clean.repeat_interleave(contexts, 0)[:, None]
    log_probs = distribution.log_probs(torch.cat([samples, own], 1))  # one call: the logits may be large
    return log_probs[:, :-1].reshape(tokens.shape), log_probs[:, -1].mean(1).view(batch, contexts).mean(1)


def replace_tokens_randomly(
    policy: Policy[AutoregressiveProcess], cond: Condition, x: Tensor, rng: Randomness, p: float
) -> Tensor:
    """Replace tokens [B, K] with probability p by a code drawn uniformly from the codebook."""
    codebook_size = teacher_forced_distribution(policy, select_rows(cond, torch.arange(1)), x[:1]).logits.shape[-1]
    codes = (rng.uniform(Purpose.RANDOM_CODE, x.shape[1]) * codebook_size).long().clamp(max=codebook_size - 1)
    return torch.where(rng.uniform(Purpose.NOISE, x.shape[1]) < p, codes, x)


def prompt_dropout_mask(rng: Randomness, p: float, draw: int = 0) -> Tensor:
    """Which prompts to drop, each with probability p: [B] bool."""
    return rng.uniform(Purpose.TEACHER_FORCED_PROMPT_DROPOUT, 1, draw=draw).flatten() < p


def sample_token_mask(rng: Randomness, tokens: Tensor, p: float, draw: int) -> Tensor:
    """Which tokens of samples [B, G, K] count: all but a random share p, at least one per sample: [B, G, K]."""
    if not p:
        return torch.ones(tokens.shape, device=tokens.device)
    kept = rng.uniform(Purpose.TOKEN_DROPOUT, *tokens.shape[1:], draw=draw) >= p
    kept[..., 0] |= ~kept.any(-1)
    return kept.float()


def start_reconstruction_scores(
    ctx: Context[AutoregressiveProcess], batch: ImageBatch, tokens: Tensor, pixels: Tensor
) -> PendingScores:
    """Begin to score samples [B, G, K] around images.

    Rewards get the image as metadata `target`, and its prompt even where that was dropped for the network.
    """
    group_size = tokens.shape[1]
    targets = pixels.cpu() if ctx.rubric.uses_threads else pixels  # threads do not wait for the sampler's stream
    metadata = [{"target": image} for image in targets for _ in range(group_size)]
    prompts = [prompt for prompt in batch.prompts for _ in range(group_size)]
    samples = ctx.policy.decode(tokens.flatten(0, 1))
    with ctx.measure_time("reward"):
        return ctx.rubric.start(samples, [prompts], metadata, group_size)


def latent_similarity(policy: Policy[AutoregressiveProcess], tokens: Tensor, pixels: Tensor) -> Tensor:
    """Cosine of the codebook vectors of samples [B, G, K] and the encoder's output for the image, minus 1: [B, G]."""
    model = policy.model.unguided
    target = model.encode_continuous(pixels).flatten(1).repeat_interleave(tokens.shape[1], 0)
    embeddings = model.token_embeddings(tokens.flatten(0, 1)).flatten(1)
    return F.cosine_similarity(embeddings, target).view(tokens.shape[:2]) - 1
