"""Teacher-forced GRPO variants: own-token context, token and prompt dropout, latent reward."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import toys

from tastemaker.config.check import compute_step_counts
from tastemaker.config.load import load
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


def told(prompts: tuple[str, ...]) -> int:
    return sum(bool(prompt) for prompt in prompts)


@pytest.mark.parametrize("guidance", [None, Guidance(2.0), Guidance(2.0, rollouts_only=True)])
def test_tokens_are_sampled_given_the_context(guidance: Guidance | None) -> None:
    learner = toys.policy("causal", guidance=guidance)
    toys.perturb(learner, 0.3)
    ctx = toys.context(learner, 8, spec=MseReward())
    objective = TeacherForcedGRPO(group_size=4, own_token_ratio=0.5)
    seen = objective.collect(ctx, toys.image_batch(8, 1, 0))
    scored = teacher_forced_distribution(learner, seen.cond.repeat(4), seen.context.flatten(0, 1))
    wanted = Categorical(scored.logits).quantile(ctx.rng.uniform("token", 4, 16).flatten(0, 1))
    assert wanted.view(8, 4, 16).equal(seen.samples)
    loss = objective.loss(ctx, seen, None)
    assert not loss.metrics["ratio_deviation"].any()
    assert toys.gradient(learner, loss.rows.sum()).abs().max() > 0


def test_own_token_positions_are_shared_within_a_group() -> None:
    learner, batch = toys.policy("causal"), toys.image_batch(200, 1, 0)
    for own in (0.3, 1.0):
        seen = TeacherForcedGRPO(group_size=2, own_token_ratio=own).collect(
            toys.context(learner, 200, spec=MseReward()), batch
        )
        theirs, given = seen.context == seen.samples, seen.context == seen.clean[:, None]
        assert (theirs | given).all()
        share = float((~given).float().sum() / (seen.samples != seen.clean[:, None]).sum())
        assert abs(share - own) < 4 * 0.5 / 3200**0.5
        assert not ((~given[:, 0] & ~theirs[:, 1]) | (~given[:, 1] & ~theirs[:, 0])).any()


def test_mixed_context_samples_do_not_depend_on_rollout_batch_size() -> None:
    learner, batch = toys.policy("causal"), toys.image_batch(8, 1, 0)
    objective, whole = (
        TeacherForcedGRPO(group_size=4, own_token_ratio=0.5, token_noise=0.5, prompt_dropout=0.3),
        toys.context(learner, 8, spec=MseReward()),
    )
    one, other = (objective.collect(replace(whole, rollout_batch_size=chunk), batch) for chunk in (None, 12))
    assert one.samples.equal(other.samples) and one.context.equal(other.context)
    assert one.cond.prompts == other.cond.prompts


def test_cross_entropy_uses_the_sampling_context() -> None:
    learner, batch = toys.policy("causal"), toys.image_batch(8, 1, 0)
    objective, ctx = (
        TeacherForcedGRPO(group_size=4, own_token_ratio=0.5, ce_coef=0.1),
        toys.context(learner, 8, spec=MseReward()),
    )
    seen = objective.collect(ctx, batch)
    wanted = teacher_forced_distribution(learner, seen.cond.repeat(4), seen.context.flatten(0, 1)).log_prob(
        seen.clean.repeat_interleave(4, 0)
    )
    loss = objective.loss(ctx, seen, None)
    torch.testing.assert_close(loss.metrics["log_likelihood"], wanted.mean(1).view(8, 4).mean(1).detach())


def test_network_calls_of_token_by_token_sampling() -> None:
    counts = compute_step_counts(load("grpo-llamagen-tf", ["objective.own_token_ratio=0.3"]))
    assert counts.rollout_network_calls == 32 * 8 * 256


def test_token_dropout_keeps_at_least_one_token() -> None:
    rng, like = Randomness(0, 0, torch.arange(100)), torch.zeros(100, 4, 16)
    for skip, mean in ((0.0, 1.0), (0.25, 0.75), (0.9999, 1 / 16)):
        kept = sample_token_mask(rng, like, skip, 0)
        assert kept.sum(-1).min() >= 1
        assert abs(float(kept.mean()) - mean) < 0.02
    alone = sample_token_mask(rng, like, 0.5, 0)
    part = sample_token_mask(replace(rng, rows=rng.rows[40:]), like[40:], 0.5, 0)
    assert part.equal(alone[40:])  # whatever the batch is cut into


def test_prompt_dropout_applies_to_sampling_and_scoring_but_not_rewards() -> None:
    learner, batch = toys.policy("causal"), toys.image_batch(400, 1, 0)
    ctx, objective = (
        toys.context(learner, 400),
        TeacherForcedGRPO(group_size=2, prompt_dropout=0.3),
    )  # its reward reads the colour asked for
    seen = objective.collect(ctx, batch)
    assert abs(told(seen.cond.prompts) / 400 - 0.7) < 4 * 0.5 / 400**0.5
    assert not objective.loss(ctx, seen, None).metrics["ratio_deviation"].any()
    made = learner.decode(seen.samples.flatten(0, 1))
    several = [prompt for prompt in batch.prompts for _ in range(2)]
    torch.testing.assert_close(seen.reward.flatten(), ctx.rubric.score(made, several).total)


def test_emulated_dropout_bug_drops_prompts_in_scoring_only() -> None:
    learner, batch = toys.policy("causal"), toys.image_batch(64, 1, 0)
    toys.perturb(learner, 0.3)
    ctx, off = toys.context(learner, 64), {}
    for drop in (None, 0.0, 1.0):
        objective = TeacherForcedGRPO(group_size=2, prompt_dropout=drop, emulate_bugs=("dropout",))
        seen = objective.collect(ctx, batch)
        assert told(seen.cond.prompts) == 64
        off[drop] = int((objective.loss(ctx, seen, None).metrics["ratio_deviation"] > 0).sum())
    assert off[0.0] == 0 < off[None] < off[1.0] == 128


def llamagen() -> Policy[Any]:
    model = LlamagenSpec(num_classes=10, class_names=tuple("abcdefghij")).tiny().load(Placement())
    return Policy(model, AutoregressiveProcess(), FullWeights(model.net))


def test_latent_reward_is_cosine_of_token_embeddings() -> None:
    learner, batch = llamagen(), replace(toys.image_batch(4, 1, 0, side=32), prompts=("a", "b", "c", "d"))
    ctx = toys.context(learner, 4, spec=MseReward())
    plain, seen = (
        TeacherForcedGRPO(group_size=3, latent_reward_weight=weight).collect(ctx, batch) for weight in (0.0, 2.0)
    )
    before = learner.model.autoencoder.encode_continuous(batch.pixels[:, 0]).flatten(2).transpose(1, 2).flatten(1)
    after = learner.model.autoencoder.token_embeddings(seen.samples.flatten(0, 1)).flatten(1)
    cosine = F.cosine_similarity(after, before.repeat_interleave(3, 0)).view(4, 3)
    torch.testing.assert_close(seen.rewards["latent"], cosine - 1)
    torch.testing.assert_close(seen.reward, plain.reward + 2 * (cosine - 1))
    assert "rewards/latent" in seen.metrics() and "rewards/latent" not in plain.metrics()


def test_latent_reward_needs_a_codebook() -> None:
    learner = toys.policy("causal")
    with pytest.raises(ConfigError, match=r"objective.latent_reward_weight: this model has no codebook"):
        TeacherForcedGRPO(latent_reward_weight=1.0).collect(
            toys.context(learner, 4, spec=MseReward()), toys.image_batch(4, 1, 0)
        )


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"own_token_ratio": 1.5}, "own_token_ratio 1.5"),
        ({"token_dropout": 1.0}, "token_dropout 1.0"),
        ({"prompt_dropout": -0.1}, "prompt_dropout -0.1"),
        ({"latent_reward_weight": -1.0}, "latent_reward_weight -1.0"),
        ({"clip_range_high": 0.0}, "clip_range_high 0.0"),
        ({"own_token_ratio": 0.5, "emulate_bugs": ("sampled_context",)}, "'emulate_bugs' has sampled_context"),
    ],
)
def test_invalid_settings_are_refused(settings: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        TeacherForcedGRPO(**settings)
