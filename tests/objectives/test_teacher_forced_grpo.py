"""Teacher-forced GRPO and CCA on a tiny LlamaGen, against recorded values of the published trainers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import toys
from safetensors.torch import load_file
from torch import Tensor, nn

from tastemaker.config.build import build
from tastemaker.config.check import find_problems
from tastemaker.config.load import load
from tastemaker.config.step_counts import compute_step_counts
from tastemaker.core.guidance import GuidedCausalBackbone
from tastemaker.core.objective import Context, NoState, SingleProcess
from tastemaker.core.policy import Backbone, Guidance, Policy
from tastemaker.core.randomness import Randomness
from tastemaker.core.types import Condition, ImageBatch, Metadata, Prompts, Segment
from tastemaker.core.weights import FullWeights
from tastemaker.models.nets.gpt import GPT, GPTConfig, KVCache
from tastemaker.objectives.advantages import group_advantages
from tastemaker.objectives.cca import CCA, ContrastivePairs
from tastemaker.objectives.grpo import GRPO
from tastemaker.objectives.teacher_forced_grpo import TeacherForcedGRPO, TeacherForcedSamples, sample_token_mask
from tastemaker.processes.autoregressive import AutoregressiveProcess
from tastemaker.rewards.target_image import MseReward
from tastemaker.training.events import SamplesGenerated
from tastemaker.training.loop import train

LLAMAGEN = Path(__file__).parent.parent / "fixtures" / "llamagen"
PUBLISHED: dict[str, TeacherForcedGRPO] = {
    "gtctx_clip1e-4": TeacherForcedGRPO(group_size=4, clip_range=1e-4),
    "gtctx_clip0.2": TeacherForcedGRPO(group_size=4, clip_range=0.2),
    "gtctx_clip0.2_kl0.01_ce0.1": TeacherForcedGRPO(group_size=4, clip_range=0.2, kl_coef=0.01, ce_coef=0.1),
    "seed_first_commit_sampledctx_clip1e-4": TeacherForcedGRPO(
        group_size=4, clip_range=1e-4, emulate_bugs=("sampled_context",)
    ),
    "noisyctx_clip0.2_ce0.1": TeacherForcedGRPO(group_size=4, clip_range=0.2, ce_coef=0.1, token_noise=0.5),
}


class RecordedLlamaGen(Backbone):
    """The tiny LlamaGen of the recorded values; prompts are class indices, and class 10 is the null class."""

    shape, pixels, forward_passes = (16,), (1, 3, 4, 4), 1

    def __init__(self) -> None:
        self.net: nn.Module = GPT(GPTConfig(64, 2, 4, None, 96, 4, "class", 1, 10))

    def embed(self, prompts: Prompts, metadata: Sequence[Metadata] = ()) -> Condition:
        return Condition(tuple(prompts), {"label": torch.tensor([int(p or 10) for p in prompts])}, tuple(metadata))

    def predict(self, x: Tensor, t: Tensor, cond: Condition) -> Tensor:
        logits: Tensor = self.net(x[:, :-1], cond.tensors["label"])[0]
        return logits

    def init_cache(self, cond: Condition) -> KVCache:
        return ()

    def decode_step(self, ids: Tensor | None, cache: KVCache, cond: Condition) -> tuple[Tensor, KVCache]:
        logits, cache = self.net(
            None if ids is None else ids[:, None], cond.tensors["label"] if ids is None else None, cache
        )
        return logits[:, -1], cache

    def encode(self, pixels: Tensor) -> Tensor:
        return (pixels[:, 0, 0] * 95).round().long().flatten(1)

    def decode(self, x: Tensor, frames: Sequence[int] | None = None) -> Tensor:
        return (x.view(-1, 1, 1, 4, 4) / 95).repeat(1, 1, 3, 1, 1)


@pytest.fixture(scope="module")
def recorded() -> dict[str, Tensor]:
    return load_file(LLAMAGEN / "ar_grpo_objective.safetensors")


def recorded_policy(recorded: dict[str, Tensor]) -> Policy[Any]:
    """Return the recorded network; its reference has the recorded reference weights."""
    model = RecordedLlamaGen()
    model.net.load_state_dict({key[6:]: x for key, x in recorded.items() if key.startswith("ref_w.")})
    weights = FullWeights(model.net, ("reference",))
    live = load_file(LLAMAGEN / "gpt_c2i_tiny.safetensors")
    model.net.load_state_dict({key[2:]: x for key, x in live.items() if key.startswith("w.")})
    return Policy(model, AutoregressiveProcess(), weights)


def context(policy: Policy[Any]) -> Context[Any]:
    return Context(policy, toys.rubric(), Randomness(0, 0, torch.arange(2)), SingleProcess(), NoState())


def recorded_experience(
    policy: Policy[Any], recorded: dict[str, Tensor], objective: TeacherForcedGRPO
) -> TeacherForcedSamples:
    clean, shape = recorded["in.gt_tokens"], (2, 4)
    noisy = torch.cat([recorded["in.noisy_context"], clean[:, -1:]], 1)
    tokens, old_log_prob = recorded["in.sampled_tokens"].view(*shape, -1), recorded["in.old_logps"].view(*shape, -1)
    reward, rng = recorded["in.rewards"], Randomness(0, 0, torch.arange(2))
    advantage = group_advantages(reward, 4, objective.unbiased_std, objective.advantage_eps).clamp(
        -objective.advantage_clip, objective.advantage_clip
    )
    cond = policy.embed([str(label) for label in recorded["in.cls"].tolist()])
    context = noisy if objective.token_noise else clean
    return TeacherForcedSamples(
        cond, clean, context[:, None], tokens, old_log_prob, rng, reward.view(shape), advantage.view(shape), {}
    )


@pytest.mark.parametrize("name", PUBLISHED)
def test_losses_and_gradients_match_published_trainer(recorded: dict[str, Tensor], name: str) -> None:
    policy, objective = recorded_policy(recorded), PUBLISHED[name]
    loss = objective.loss(context(policy), recorded_experience(policy, recorded, objective), None)
    torch.testing.assert_close(loss.rows.mean(), recorded[f"out.{name}.loss"][0], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(loss.metrics["ratio"], recorded[f"out.{name}.ratio"].mean(1), rtol=1e-4, atol=0)
    grad_norm = toys.gradient(policy, loss.rows.mean()).norm()
    torch.testing.assert_close(grad_norm, recorded[f"out.{name}.grad_norm"][0], rtol=1e-4, atol=1e-5)


def test_loss_with_token_dropout_is_mean_over_kept_tokens(recorded: dict[str, Tensor]) -> None:
    policy, objective = recorded_policy(recorded), TeacherForcedGRPO(group_size=4, clip_range=0.2, token_dropout=0.5)
    samples, token_losses = (
        recorded_experience(policy, recorded, objective),
        recorded["out.gtctx_clip0.2.per_token_loss"],
    )
    losses = []
    for epoch in (0, 1):
        kept = sample_token_mask(samples.rng, samples.samples, 0.5, epoch).flatten(0, 1)
        loss = objective.loss(replace(context(policy), epoch=epoch), samples, None)
        expected = ((token_losses * kept).sum(1) / kept.sum(1)).view(2, 4).mean(1)
        torch.testing.assert_close(loss.rows.detach(), expected, rtol=1e-4, atol=1e-5)
        losses.append(loss.rows)
    assert not losses[0].equal(losses[1])  # each epoch drops other tokens


@torch.no_grad()
def test_log_probs_match_published_with_and_without_guidance(recorded: dict[str, Tensor]) -> None:
    policy, tokens = recorded_policy(recorded), recorded["in.sampled_tokens"]
    ones = torch.ones(8)
    segment = Segment(ones, 0 * ones, tokens, tokens, tokens, tokens)
    for model, name in ((policy.model, "nocfg"), (GuidedCausalBackbone(policy.model, Guidance(2.0)), "cfg2")):
        cond = model.embed([str(label) for label in recorded["in.cls"].tolist()]).repeat(4)
        log_probs = policy.process.action_distribution(model, cond, segment).log_prob(tokens)
        torch.testing.assert_close(log_probs, recorded[f"out.{name}_logps"], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("loss_type", ["cca", "dpo"])
def test_cca_loss_matches_published(recorded: dict[str, Tensor], loss_type: Any) -> None:
    policy = recorded_policy(recorded)
    positive, negative = (
        policy.embed([str(i) for i in recorded[f"in.{name}"].tolist()]) for name in ("cls", "neg_cls")
    )
    pairs = ContrastivePairs(
        positive, negative, recorded["in.gt_tokens"], torch.zeros(2, dtype=torch.bool), context(policy).rng
    )
    loss = CCA(loss_type=loss_type).loss(context(policy), pairs, None)
    torch.testing.assert_close(loss.rows.mean(), recorded[f"out.{loss_type}.loss"][0], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(loss.metrics["log_ratio/positive"], recorded["out.cca.gap_pos"], rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(loss.metrics["log_ratio/negative"], recorded["out.cca.gap_neg"], rtol=1e-3, atol=1e-4)


def test_cca_without_condition_has_positive_term_only(recorded: dict[str, Tensor]) -> None:
    policy = recorded_policy(recorded)
    cond = policy.embed(["", ""])
    for loss_type in ("cca", "dpo"):
        pairs = ContrastivePairs(
            cond, cond, recorded["in.gt_tokens"], torch.ones(2, dtype=torch.bool), context(policy).rng
        )
        loss = CCA(beta=0.5, negative_weight=10.0, loss_type=loss_type).loss(context(policy), pairs, None)  # type: ignore[arg-type]
        positive_term = torch.nn.functional.softplus(-0.5 * loss.metrics["log_ratio/positive"])
        torch.testing.assert_close(loss.rows.detach(), positive_term / (10 if loss_type == "cca" else 1))


def test_cca_negative_is_the_next_prompt() -> None:
    policy = toys.policy("causal", snapshots=("reference",))
    batch = toys.image_batch(8, 1, 0)
    pairs = CCA(prompt_dropout=0.0).collect(toys.context(policy, 8), batch)
    next_prompts = batch.prompts[1:] + batch.prompts[:1]
    assert pairs.positive.prompts == batch.prompts
    assert pairs.negative.prompts == next_prompts
    assert pairs.has_no_negative.tolist() == [
        one == other for one, other in zip(batch.prompts, next_prompts, strict=True)
    ]


def test_first_ratios_are_one_and_first_loss_is_zero() -> None:
    """Advantages of a group add up to zero, and at a ratio of one so do its losses."""
    policy = toys.policy("causal")
    for objective in (TeacherForcedGRPO(), TeacherForcedGRPO(token_noise=0.5)):
        ctx = toys.context(policy, 8, spec=MseReward())
        samples = objective.collect(ctx, toys.image_batch(8, 1, 0))
        loss = objective.loss(ctx, samples, None)
        assert not loss.metrics["ratio_deviation"].any()
        torch.testing.assert_close(loss.rows, torch.zeros(8), rtol=0, atol=1e-5)
        assert toys.gradient(policy, loss.rows.sum()).abs().max() > 0


def test_samples_are_teacher_forced() -> None:
    policy = toys.policy("causal")
    toys.perturb(policy, 0.3)
    ctx, batch = toys.context(policy, 8, spec=MseReward()), toys.image_batch(8, 1, 0)
    samples = TeacherForcedGRPO(group_size=512).collect(ctx, batch)
    expected = policy.model.predict(samples.clean, torch.ones(8), samples.cond).softmax(-1)  # [B, K, V]
    frequencies = torch.nn.functional.one_hot(samples.samples, expected.shape[-1]).float().mean(1)
    assert (frequencies - expected).abs().max() < 5 * 0.5 / 512**0.5  # five standard errors of a frequency
    assert samples.context[:, 0].equal(samples.clean)


def test_rewards_get_the_target_image() -> None:
    policy, batch = toys.policy("causal"), toys.image_batch(4, 1, 0)
    samples = TeacherForcedGRPO(group_size=3).collect(toys.context(policy, 4, spec=MseReward()), batch)
    images = policy.decode(samples.samples.flatten(0, 1)).view(4, 3, *batch.pixels.shape[1:])
    expected = -(images - batch.pixels[:, None]).square().flatten(2).mean(2)
    torch.testing.assert_close(samples.reward, expected)
    torch.testing.assert_close(samples.advantage.mean(1), torch.zeros(4), rtol=0, atol=1e-5)


def test_samples_do_not_depend_on_rollout_batch_size() -> None:
    policy, batch, objective = (
        toys.policy("causal"),
        toys.image_batch(8, 1, 0),
        TeacherForcedGRPO(group_size=4, token_noise=0.5),
    )
    ctx = toys.context(policy, 8, spec=MseReward())
    full, chunked = (
        objective.collect(replace(ctx, rollout_batch_size=rollout_batch_size), batch)
        for rollout_batch_size in (None, 12)
    )
    assert full.samples.equal(chunked.samples)
    torch.testing.assert_close(full.log_prob, chunked.log_prob)


def test_token_noise_rate() -> None:
    policy, batch = toys.policy("causal"), toys.image_batch(400, 1, 0)
    ctx = replace(toys.context(policy, 400, spec=MseReward()), rollout_batch_size=None)
    samples = TeacherForcedGRPO(group_size=2, token_noise=0.5).collect(ctx, batch)
    replaced = float((samples.context[:, 0] != samples.clean).float().mean())
    assert abs(replaced - 0.5 * 7 / 8) < 4 * 0.5 / 6400**0.5  # one random code in eight equals the original


def test_emulated_bugs_change_the_first_ratio(recorded: dict[str, Tensor]) -> None:
    policy = recorded_policy(recorded)
    gpt_config = GPTConfig(64, 2, 4, None, 96, 4, "class", 1, 10, dropout=0.1)
    batch = ImageBatch(("3", "9"), recorded["in.gt_tokens"].view(2, 1, 1, 4, 4).repeat(1, 1, 3, 1, 1) / 95)
    clip_fraction = {}
    for bugs in ((), ("sampled_context",), ("dropout",)):
        if bugs == ("dropout",):
            state = policy.model.net.state_dict()
            policy.model.net = GPT(gpt_config)
            policy.model.net.load_state_dict(state)
        objective = TeacherForcedGRPO(emulate_bugs=bugs)  # type: ignore[arg-type]
        ctx = replace(context(policy), rubric=toys.rubric(MseReward()))
        samples = objective.collect(ctx, batch)
        clip_fraction[bugs] = float(objective.loss(ctx, samples, None).metrics["clip_fraction"].mean())
    # The first published trainer clips all but the first of 16 tokens, and all tokens.
    assert clip_fraction[()] == 0
    assert clip_fraction[("sampled_context",)] == pytest.approx(15 / 16, abs=0.02)
    assert clip_fraction[("dropout",)] > 0.95


@pytest.mark.parametrize("rollouts_only", [False, True])
def test_guided_samples_have_a_first_ratio_of_one(rollouts_only: bool) -> None:
    policy = toys.policy("causal", snapshots=("reference",), guidance=Guidance(2.0, rollouts_only=rollouts_only))
    ctx, objective = toys.context(policy, 8), GRPO(group_size=4, kl_coef=0.1)
    rollout = objective.collect(ctx, toys.prompts(8))
    loss = objective.loss(ctx, rollout, 0)
    assert not loss.metrics["ratio_deviation"].any()
    assert not loss.metrics["kl"].any()
    cond = policy.model.model.embed(rollout.trajectory.cond.prompts) if rollouts_only else rollout.trajectory.cond
    model = policy.model.model if rollouts_only else policy.model
    (segment,) = rollout.trajectory.segments
    expected = model.predict(segment.state, segment.t, cond).log_softmax(-1).gather(-1, segment.action[..., None])
    torch.testing.assert_close(segment.log_prob, expected[..., 0].detach(), rtol=1e-4, atol=1e-5)


def test_emulated_bugs_are_warned_about() -> None:
    settings = ["objective.ce_coef=0", "objective.emulate_bugs=[sampled_context, dropout]"]
    with pytest.warns(UserWarning, match=r"objective\.emulate_bugs") as warnings:
        build(load("teacher-forced-grpo-toy-causal", settings))
    assert ["'dropout'" in str(warning.message) for warning in warnings] == [False, True]


def test_displayed_samples_are_scored_against_images(tmp_path: Path) -> None:
    run = build(load("teacher-forced-grpo-toy-causal", ["steps=1"]), tmp_path)
    events = [event for event in train(run) if isinstance(event, SamplesGenerated)]
    assert [{"mse"} == event.scores.keys() for event in events] == [True, True]


def test_dropout_is_refused_with_log_probs() -> None:
    for recipe in ("grpo-llamagen", "grpo-llamagen-tf"):
        (problem,) = find_problems(load(recipe, ["model.dropout=0.1"]))
        assert problem.startswith("model.dropout: 0.1")
    assert find_problems(load("grpo-llamagen-tf", ["model.dropout=0.1", "objective.emulate_bugs=[dropout]"])) == []
    assert find_problems(load("llamagen-pretrain")) == []


def test_teacher_forced_grpo_needs_rewards() -> None:
    (problem,) = find_problems(load("teacher-forced-grpo-toy-causal", ["rewards.mse.weight=0"]))
    assert problem.startswith("rewards: ") and "weight 0" in problem


def test_plan_of_teacher_forced_grpo() -> None:
    counts = compute_step_counts(load("grpo-llamagen-tf"))
    assert (counts.samples, counts.rollout_network_calls, counts.minibatch_size) == (256, 32, 8)


def test_defaults_match_published_trainer() -> None:
    config = load("grpo-llamagen-tf")
    assert config.objective == TeacherForcedGRPO(
        group_size=8, clip_range=1e-4, advantage_clip=5.0, unbiased_std=True, advantage_eps=1e-8
    )
    assert (config.optim.lr, config.optim.weight_decay, config.optim.betas) == (1e-5, 1e-2, (0.9, 0.95))
    assert (config.optim.max_grad_norm, config.batch.prompts, config.batch.minibatches) == (1.0, 32, 32)
    assert (config.engine.precision, config.engine.reduce_dtype, config.sample.every, config.steps) == (
        "bf16",
        "bf16",
        100,
        100,
    )
    assert config.process == AutoregressiveProcess(temperature=1.0, top_k=0, top_p=1.0)
