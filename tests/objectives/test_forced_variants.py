"""What successors of LlamaGen's trainer add: contexts of one's own tokens, tokens and conditions left out, vectors."""

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
from tastemaker.models.llamagen.model import Llamagen
from tastemaker.objectives.forced_grpo import TeacherForcedGRPO
from tastemaker.objectives.teacher_forcing import teacher_forced_distribution
from tastemaker.objectives.token_noise import sample_token_mask
from tastemaker.processes.autoregressive import AutoregressiveProcess
from tastemaker.rewards.target_image import Mse


def told(prompts: tuple[str, ...]) -> int:
    return sum(bool(prompt) for prompt in prompts)


@pytest.mark.parametrize("guidance", [None, Guidance(2.0), Guidance(2.0, rollouts_only=True)])
def test_each_token_is_drawn_by_what_was_read_before_it(guidance: Guidance | None) -> None:
    learner = toys.policy("causal", guidance=guidance)
    toys.move(learner, 0.3)
    ctx = toys.context(learner, 8, spec=Mse())
    objective = TeacherForcedGRPO(group=4, own=0.5)
    seen = objective.collect(ctx, toys.pictures(8, 1, 0))
    scored = teacher_forced_distribution(learner, seen.cond.repeat(4), seen.context.flatten(0, 1))
    wanted = Categorical(scored.logits).quantile(ctx.rng.uniform("token", 4, 16).flatten(0, 1))
    assert wanted.view(8, 4, 16).equal(seen.drawn)
    loss = objective.loss(ctx, seen, None)
    assert not loss.metrics["ratio_off"].any()
    assert toys.gradient(learner, loss.rows.sum()).abs().max() > 0


def test_the_share_read_of_ones_own_is_the_same_places_in_all_of_a_group() -> None:
    learner, batch = toys.policy("causal"), toys.pictures(200, 1, 0)
    for own in (0.3, 1.0):
        seen = TeacherForcedGRPO(group=2, own=own).collect(toys.context(learner, 200, spec=Mse()), batch)
        theirs, given = seen.context == seen.drawn, seen.context == seen.clean[:, None]
        assert (theirs | given).all()
        share = float((~given).float().sum() / (seen.drawn != seen.clean[:, None]).sum())
        assert abs(share - own) < 4 * 0.5 / 3200**0.5
        assert not ((~given[:, 0] & ~theirs[:, 1]) | (~given[:, 1] & ~theirs[:, 0])).any()


def test_mixed_samples_are_the_same_however_they_are_cut() -> None:
    learner, batch = toys.policy("causal"), toys.pictures(8, 1, 0)
    objective, whole = TeacherForcedGRPO(group=4, own=0.5, noise=0.5, drop=0.3), toys.context(learner, 8, spec=Mse())
    one, other = (objective.collect(replace(whole, chunk=chunk), batch) for chunk in (None, 12))
    assert one.drawn.equal(other.drawn) and one.context.equal(other.context)
    assert one.cond.prompts == other.cond.prompts


def test_the_prior_reads_what_samples_read() -> None:
    learner, batch = toys.policy("causal"), toys.pictures(8, 1, 0)
    objective, ctx = TeacherForcedGRPO(group=4, own=0.5, prior=0.1), toys.context(learner, 8, spec=Mse())
    seen = objective.collect(ctx, batch)
    wanted = teacher_forced_distribution(learner, seen.cond.repeat(4), seen.context.flatten(0, 1)).log_prob(
        seen.clean.repeat_interleave(4, 0)
    )
    loss = objective.loss(ctx, seen, None)
    torch.testing.assert_close(loss.metrics["likelihood"], wanted.mean(1).view(8, 4).mean(1).detach())


def test_writing_one_after_the_other_is_counted() -> None:
    calls = compute_step_counts(load("grpo-llamagen-tf", ["objective.own=0.3"]))["network calls a step to sample"]
    assert calls == 32 * 8 * 256
    assert (TeacherForcedGRPO(own=0.3).rows_at_once(), TeacherForcedGRPO().rows_at_once()) == (8, 1)


def test_of_every_sample_at_least_one_token_counts() -> None:
    rng, like = Randomness(0, 0, torch.arange(100)), torch.zeros(100, 4, 16)
    for skip, mean in ((0.0, 1.0), (0.25, 0.75), (0.9999, 1 / 16)):
        kept = sample_token_mask(rng, like, skip, 0)
        assert kept.sum(-1).min() >= 1
        assert abs(float(kept.mean()) - mean) < 0.02
    alone = sample_token_mask(rng, like, 0.5, 0)
    part = sample_token_mask(replace(rng, rows=rng.rows[40:]), like[40:], 0.5, 0)
    assert part.equal(alone[40:])  # whatever the batch is cut into


def test_conditions_are_left_out_in_drawing_and_scoring_alike_but_rewards_read_them() -> None:
    learner, batch = toys.policy("causal"), toys.pictures(400, 1, 0)
    ctx, objective = (
        toys.context(learner, 400),
        TeacherForcedGRPO(group=2, drop=0.3),
    )  # its reward reads the colour asked for
    seen = objective.collect(ctx, batch)
    assert abs(told(seen.cond.prompts) / 400 - 0.7) < 4 * 0.5 / 400**0.5
    assert not objective.loss(ctx, seen, None).metrics["ratio_off"].any()
    made = learner.decode(seen.drawn.flatten(0, 1))
    several = [prompt for prompt in batch.prompts for _ in range(2)]
    torch.testing.assert_close(seen.reward.flatten(), ctx.rubric.score(made, several).total)


def test_with_the_fault_conditions_are_left_out_of_scoring_alone() -> None:
    learner, batch = toys.policy("causal"), toys.pictures(64, 1, 0)
    toys.move(learner, 0.3)
    ctx, off = toys.context(learner, 64), {}
    for drop in (None, 0.0, 1.0):
        objective = TeacherForcedGRPO(group=2, drop=drop, faults=("dropout",))
        seen = objective.collect(ctx, batch)
        assert told(seen.cond.prompts) == 64
        off[drop] = int((objective.loss(ctx, seen, None).metrics["ratio_off"] > 0).sum())
    assert off[0.0] == 0 < off[None] < off[1.0] == 128


def llamagen() -> Policy[Any]:
    model = Llamagen(classes=10, names=tuple("abcdefghij")).tiny().load(Placement())
    return Policy(model, AutoregressiveProcess(), FullWeights(model.net))


def test_vectors_of_tokens_near_the_pictures_are_rewarded() -> None:
    learner, batch = llamagen(), replace(toys.pictures(4, 1, 0, side=32), prompts=("a", "b", "c", "d"))
    ctx = toys.context(learner, 4, spec=Mse())
    plain, seen = (TeacherForcedGRPO(group=3, latent=weight).collect(ctx, batch) for weight in (0.0, 2.0))
    before = learner.model.codec.latents(batch.pixels[:, 0]).flatten(2).transpose(1, 2).flatten(1)
    after = learner.model.codec.vectors(seen.drawn.flatten(0, 1)).flatten(1)
    cosine = F.cosine_similarity(after, before.repeat_interleave(3, 0)).view(4, 3)
    torch.testing.assert_close(seen.parts["latent"], cosine - 1)
    torch.testing.assert_close(seen.reward, plain.reward + 2 * (cosine - 1))
    assert "reward/latent" in seen.watched() and "reward/latent" not in plain.watched()


def test_a_model_whose_tokens_stand_for_nothing_is_told_so() -> None:
    learner = toys.policy("causal")
    with pytest.raises(ConfigError, match=r"objective.latent: the tokens of this model stand for no vectors; set"):
        TeacherForcedGRPO(latent=1.0).collect(toys.context(learner, 4, spec=Mse()), toys.pictures(4, 1, 0))


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"own": 1.5}, "own 1.5"),
        ({"skip": 1.0}, "skip 1.0"),
        ({"drop": -0.1}, "drop -0.1"),
        ({"latent": -1.0}, "latent .*-1.0"),
        ({"rise": 0.0}, "rise 0.0"),
        ({"own": 0.5, "faults": ("sampled_context",)}, "set prior, noise and own to 0"),
    ],
)
def test_settings_that_make_no_sense_are_a_sentence(settings: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        TeacherForcedGRPO(**settings)
