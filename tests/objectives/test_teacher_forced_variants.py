"""Teacher-forced GRPO variants: own-token context, token and prompt dropout, latent reward."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import toys

from tastemaker.config.load import load
from tastemaker.config.step_counts import compute_step_counts
from tastemaker.core.distributions import Categorical
from tastemaker.core.policy import Guidance, Policy
from tastemaker.core.randomness import Randomness
from tastemaker.core.registry import ConfigError
from tastemaker.core.types import Placement
from tastemaker.core.weights import FullWeights
from tastemaker.models.llamagen.model import LlamagenSpec
from tastemaker.objectives.teacher_forced_grpo import TeacherForcedGRPO, sample_token_mask, teacher_forced_distribution
from tastemaker.processes.autoregressive import AutoregressiveProcess
from tastemaker.rewards.target_image import MseReward


def num_with_prompt(prompts: tuple[str, ...]) -> int:
    return sum(bool(prompt) for prompt in prompts)


@pytest.mark.parametrize("guidance", [None, Guidance(2.0), Guidance(2.0, rollouts_only=True)])
def test_tokens_are_sampled_given_the_context(guidance: Guidance | None) -> None:
    policy = toys.policy("causal", guidance=guidance)
    toys.perturb(policy, 0.3)
    ctx = toys.context(policy, 8, spec=MseReward())
    objective = TeacherForcedGRPO(group_size=4, own_token_ratio=0.5)
    samples = objective.collect(ctx, toys.image_batch(8, 1, 0))
    distribution = teacher_forced_distribution(policy, samples.cond.repeat(4), samples.context.flatten(0, 1))
    expected = Categorical(distribution.logits).quantile(ctx.rng.uniform("token", 4, 16).flatten(0, 1))
    assert expected.view(8, 4, 16).equal(samples.samples)
    loss = objective.loss(ctx, samples, None)
    assert not loss.metrics["ratio_deviation"].any()
    assert toys.gradient(policy, loss.rows.sum()).abs().max() > 0


def test_own_token_positions_are_shared_within_a_group() -> None:
    policy, batch = toys.policy("causal"), toys.image_batch(200, 1, 0)
    for ratio in (0.3, 1.0):
        samples = TeacherForcedGRPO(group_size=2, own_token_ratio=ratio).collect(
            toys.context(policy, 200, spec=MseReward()), batch
        )
        is_own, is_clean = samples.context == samples.samples, samples.context == samples.clean[:, None]
        assert (is_own | is_clean).all()
        own_share = float((~is_clean).float().sum() / (samples.samples != samples.clean[:, None]).sum())
        assert abs(own_share - ratio) < 4 * 0.5 / 3200**0.5
        assert not ((~is_clean[:, 0] & ~is_own[:, 1]) | (~is_clean[:, 1] & ~is_own[:, 0])).any()


def test_mixed_context_samples_do_not_depend_on_rollout_batch_size() -> None:
    policy, batch = toys.policy("causal"), toys.image_batch(8, 1, 0)
    objective, ctx = (
        TeacherForcedGRPO(group_size=4, own_token_ratio=0.5, token_noise=0.5, prompt_dropout=0.3),
        toys.context(policy, 8, spec=MseReward()),
    )
    full, chunked = (
        objective.collect(replace(ctx, rollout_batch_size=rollout_batch_size), batch)
        for rollout_batch_size in (None, 12)
    )
    assert full.samples.equal(chunked.samples) and full.context.equal(chunked.context)
    assert full.cond.prompts == chunked.cond.prompts


def test_cross_entropy_uses_the_sampling_context() -> None:
    policy, batch = toys.policy("causal"), toys.image_batch(8, 1, 0)
    objective, ctx = (
        TeacherForcedGRPO(group_size=4, own_token_ratio=0.5, ce_coef=0.1),
        toys.context(policy, 8, spec=MseReward()),
    )
    samples = objective.collect(ctx, batch)
    expected = teacher_forced_distribution(policy, samples.cond.repeat(4), samples.context.flatten(0, 1)).log_prob(
        samples.clean.repeat_interleave(4, 0)
    )
    loss = objective.loss(ctx, samples, None)
    torch.testing.assert_close(loss.metrics["log_likelihood"], expected.mean(1).view(8, 4).mean(1).detach())


def test_network_calls_of_token_by_token_sampling() -> None:
    counts = compute_step_counts(load("grpo-llamagen-tf", ["objective.own_token_ratio=0.3"]))
    assert counts.rollout_network_calls == 32 * 8 * 256


def test_token_dropout_keeps_at_least_one_token() -> None:
    rng, like = Randomness(0, 0, torch.arange(100)), torch.zeros(100, 4, 16)
    for dropout, mean in ((0.0, 1.0), (0.25, 0.75), (0.9999, 1 / 16)):
        kept = sample_token_mask(rng, like, dropout, 0)
        assert kept.sum(-1).min() >= 1
        assert abs(float(kept.mean()) - mean) < 0.02
    full = sample_token_mask(rng, like, 0.5, 0)
    subset = sample_token_mask(replace(rng, rows=rng.rows[40:]), like[40:], 0.5, 0)
    assert subset.equal(full[40:])  # independent of the batch


def test_prompt_dropout_applies_to_sampling_and_scoring_but_not_rewards() -> None:
    policy, batch = toys.policy("causal"), toys.image_batch(400, 1, 0)
    ctx, objective = (
        toys.context(policy, 400),
        TeacherForcedGRPO(group_size=2, prompt_dropout=0.3),
    )  # the reward depends on the color in the prompt
    samples = objective.collect(ctx, batch)
    assert abs(num_with_prompt(samples.cond.prompts) / 400 - 0.7) < 4 * 0.5 / 400**0.5
    assert not objective.loss(ctx, samples, None).metrics["ratio_deviation"].any()
    images = policy.decode(samples.samples.flatten(0, 1))
    prompts = [prompt for prompt in batch.prompts for _ in range(2)]
    torch.testing.assert_close(samples.reward.flatten(), ctx.rubric.score(images, prompts).total)


def test_emulated_dropout_bug_drops_prompts_in_scoring_only() -> None:
    policy, batch = toys.policy("causal"), toys.image_batch(64, 1, 0)
    toys.perturb(policy, 0.3)
    ctx, num_off_policy = toys.context(policy, 64), {}
    for prompt_dropout in (None, 0.0, 1.0):
        objective = TeacherForcedGRPO(group_size=2, prompt_dropout=prompt_dropout, emulate_bugs=("dropout",))
        samples = objective.collect(ctx, batch)
        assert num_with_prompt(samples.cond.prompts) == 64
        num_off_policy[prompt_dropout] = int((objective.loss(ctx, samples, None).metrics["ratio_deviation"] > 0).sum())
    assert num_off_policy[0.0] == 0 < num_off_policy[None] < num_off_policy[1.0] == 128


def llamagen() -> Policy[Any]:
    model = LlamagenSpec(num_classes=10, class_names=tuple("abcdefghij")).tiny().load(Placement())
    return Policy(model, AutoregressiveProcess(), FullWeights(model.net))


def test_latent_reward_is_cosine_of_token_embeddings() -> None:
    policy, batch = llamagen(), replace(toys.image_batch(4, 1, 0, side=32), prompts=("a", "b", "c", "d"))
    ctx = toys.context(policy, 4, spec=MseReward())
    plain, samples = (
        TeacherForcedGRPO(group_size=3, latent_reward_weight=weight).collect(ctx, batch) for weight in (0.0, 2.0)
    )
    target = policy.model.autoencoder.encode_continuous(batch.pixels[:, 0]).flatten(2).transpose(1, 2).flatten(1)
    embeddings = policy.model.autoencoder.token_embeddings(samples.samples.flatten(0, 1)).flatten(1)
    cosine = F.cosine_similarity(embeddings, target.repeat_interleave(3, 0)).view(4, 3)
    torch.testing.assert_close(samples.rewards["latent"], cosine - 1)
    torch.testing.assert_close(samples.reward, plain.reward + 2 * (cosine - 1))
    assert "rewards/latent" in samples.metrics() and "rewards/latent" not in plain.metrics()


def test_latent_reward_needs_a_codebook() -> None:
    policy = toys.policy("causal")
    with pytest.raises(ConfigError, match=r"objective\.latent_reward_weight: .*TM098"):
        TeacherForcedGRPO(latent_reward_weight=1.0).collect(
            toys.context(policy, 4, spec=MseReward()), toys.image_batch(4, 1, 0)
        )


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"own_token_ratio": 1.5}, r"own_token_ratio.*1\.5"),
        ({"token_dropout": 1.0}, r"token_dropout.*1\.0"),
        ({"prompt_dropout": -0.1}, r"prompt_dropout.*-0\.1"),
        ({"latent_reward_weight": -1.0}, r"latent_reward_weight.*-1\.0"),
        ({"clip_range_high": 0.0}, r"clip_range_high.*0\.0"),
        ({"own_token_ratio": 0.5, "emulate_bugs": ("sampled_context",)}, "'emulate_bugs'.*sampled_context"),
    ],
)
def test_invalid_settings_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TeacherForcedGRPO(**settings)
