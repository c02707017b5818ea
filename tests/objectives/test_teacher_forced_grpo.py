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
from tastemaker.config.check import compute_step_counts, find_problems
from tastemaker.config.load import load
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


class Recorded(Backbone):
    """The tiny LlamaGen of the recordings; prompts are the numbers of classes, the last of which is none."""

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
def golden() -> dict[str, Tensor]:
    return load_file(LLAMAGEN / "ar_grpo_objective.safetensors")


def policy(golden: dict[str, Tensor]) -> Policy[Any]:
    """The recorded network, whose reference is the recorded one before it was changed."""
    model = Recorded()
    model.net.load_state_dict({key[6:]: x for key, x in golden.items() if key.startswith("ref_w.")})
    weights = FullWeights(model.net, ("reference",))
    now = load_file(LLAMAGEN / "gpt_c2i_tiny.safetensors")
    model.net.load_state_dict({key[2:]: x for key, x in now.items() if key.startswith("w.")})
    return Policy(model, AutoregressiveProcess(), weights)


def context(learner: Policy[Any]) -> Context[Any]:
    return Context(learner, toys.rubric(), Randomness(0, 0, torch.arange(2)), SingleProcess(), NoState())


def experience(learner: Policy[Any], golden: dict[str, Tensor], objective: TeacherForcedGRPO) -> TeacherForcedSamples:
    clean, shape = golden["in.gt_tokens"], (2, 4)
    noisy = torch.cat([golden["in.noisy_context"], clean[:, -1:]], 1)
    tokens, old = golden["in.sampled_tokens"].view(*shape, -1), golden["in.old_logps"].view(*shape, -1)
    reward, rng = golden["in.rewards"], Randomness(0, 0, torch.arange(2))
    advantage = group_advantages(reward, 4, objective.unbiased_std, objective.advantage_eps).clamp(
        -objective.advantage_clip, objective.advantage_clip
    )
    cond = learner.embed([str(label) for label in golden["in.cls"].tolist()])
    read = noisy if objective.token_noise else clean
    return TeacherForcedSamples(
        cond, clean, read[:, None], tokens, old, rng, reward.view(shape), advantage.view(shape), {}
    )


@pytest.mark.parametrize("name", PUBLISHED)
def test_losses_and_gradients_match_published_trainer(golden: dict[str, Tensor], name: str) -> None:
    learner, objective = policy(golden), PUBLISHED[name]
    loss = objective.loss(context(learner), experience(learner, golden, objective), None)
    torch.testing.assert_close(loss.rows.mean(), golden[f"out.{name}.loss"][0], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(loss.metrics["ratio"], golden[f"out.{name}.ratio"].mean(1), rtol=1e-4, atol=0)
    found = toys.gradient(learner, loss.rows.mean()).norm()
    torch.testing.assert_close(found, golden[f"out.{name}.grad_norm"][0], rtol=1e-4, atol=1e-5)


def test_loss_with_token_dropout_is_mean_over_kept_tokens(golden: dict[str, Tensor]) -> None:
    learner, objective = policy(golden), TeacherForcedGRPO(group_size=4, clip_range=0.2, token_dropout=0.5)
    seen, each = experience(learner, golden, objective), golden["out.gtctx_clip0.2.per_token_loss"]
    found = []
    for epoch in (0, 1):
        kept = sample_token_mask(seen.rng, seen.samples, 0.5, epoch).flatten(0, 1)
        loss = objective.loss(replace(context(learner), epoch=epoch), seen, None)
        wanted = ((each * kept).sum(1) / kept.sum(1)).view(2, 4).mean(1)
        torch.testing.assert_close(loss.rows.detach(), wanted, rtol=1e-4, atol=1e-5)
        found.append(loss.rows)
    assert not found[0].equal(found[1])  # others each time


@torch.no_grad()
def test_log_probs_match_published_with_and_without_guidance(golden: dict[str, Tensor]) -> None:
    learner, tokens = policy(golden), golden["in.sampled_tokens"]
    ends = torch.ones(8)
    segment = Segment(ends, 0 * ends, tokens, tokens, tokens, tokens)
    for model, name in ((learner.model, "nocfg"), (GuidedCausalBackbone(learner.model, Guidance(2.0)), "cfg2")):
        cond = model.embed([str(label) for label in golden["in.cls"].tolist()]).repeat(4)
        found = learner.process.action_distribution(model, cond, segment).log_prob(tokens)
        torch.testing.assert_close(found, golden[f"out.{name}_logps"], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("form", ["cca", "dpo"])
def test_cca_loss_matches_published(golden: dict[str, Tensor], form: Any) -> None:
    learner = policy(golden)
    right, wrong = (learner.embed([str(i) for i in golden[f"in.{name}"].tolist()]) for name in ("cls", "neg_cls"))
    seen = ContrastivePairs(
        right, wrong, golden["in.gt_tokens"], torch.zeros(2, dtype=torch.bool), context(learner).rng
    )
    loss = CCA(loss_type=form).loss(context(learner), seen, None)
    torch.testing.assert_close(loss.rows.mean(), golden[f"out.{form}.loss"][0], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(loss.metrics["log_ratio/positive"], golden["out.cca.gap_pos"], rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(loss.metrics["log_ratio/negative"], golden["out.cca.gap_neg"], rtol=1e-3, atol=1e-4)


def test_cca_without_condition_has_positive_term_only(golden: dict[str, Tensor]) -> None:
    learner = policy(golden)
    cond = learner.embed(["", ""])
    for form in ("cca", "dpo"):
        seen = ContrastivePairs(
            cond, cond, golden["in.gt_tokens"], torch.ones(2, dtype=torch.bool), context(learner).rng
        )
        loss = CCA(beta=0.5, negative_weight=10.0, loss_type=form).loss(context(learner), seen, None)  # type: ignore[arg-type]
        alone = torch.nn.functional.softplus(-0.5 * loss.metrics["log_ratio/positive"])
        torch.testing.assert_close(loss.rows.detach(), alone / (10 if form == "cca" else 1))


def test_cca_negative_is_the_next_prompt() -> None:
    learner = toys.policy("causal", snapshots=("reference",))
    batch = toys.pictures(8, 1, 0)
    seen = CCA(prompt_dropout=0.0).collect(toys.context(learner, 8), batch)
    others = batch.prompts[1:] + batch.prompts[:1]
    assert seen.positive.prompts == batch.prompts
    assert seen.negative.prompts == others
    assert seen.has_no_negative.tolist() == [one == other for one, other in zip(batch.prompts, others, strict=True)]


def test_first_ratios_are_one_and_first_loss_is_zero() -> None:
    """Advantages of a group add up to nothing, and at a ratio of one so do its losses."""
    learner = toys.policy("causal")
    for objective in (TeacherForcedGRPO(), TeacherForcedGRPO(token_noise=0.5)):
        ctx = toys.context(learner, 8, spec=MseReward())
        seen = objective.collect(ctx, toys.pictures(8, 1, 0))
        loss = objective.loss(ctx, seen, None)
        assert not loss.metrics["ratio_deviation"].any()
        torch.testing.assert_close(loss.rows, torch.zeros(8), rtol=0, atol=1e-5)
        assert toys.gradient(learner, loss.rows.sum()).abs().max() > 0


def test_samples_are_teacher_forced() -> None:
    learner = toys.policy("causal")
    toys.move(learner, 0.3)
    ctx, batch = toys.context(learner, 8, spec=MseReward()), toys.pictures(8, 1, 0)
    seen = TeacherForcedGRPO(group_size=512).collect(ctx, batch)
    wanted = learner.model.predict(seen.clean, torch.ones(8), seen.cond).softmax(-1)  # [B, K, V]
    found = torch.nn.functional.one_hot(seen.samples, wanted.shape[-1]).float().mean(1)
    assert (found - wanted).abs().max() < 5 * 0.5 / 512**0.5  # standard errors of a share
    assert seen.context[:, 0].equal(seen.clean)


def test_rewards_get_the_target_image() -> None:
    learner, batch = toys.policy("causal"), toys.pictures(4, 1, 0)
    seen = TeacherForcedGRPO(group_size=3).collect(toys.context(learner, 4, spec=MseReward()), batch)
    made = learner.decode(seen.samples.flatten(0, 1)).view(4, 3, *batch.pixels.shape[1:])
    wanted = -(made - batch.pixels[:, None]).square().flatten(2).mean(2)
    torch.testing.assert_close(seen.reward, wanted)
    torch.testing.assert_close(seen.advantage.mean(1), torch.zeros(4), rtol=0, atol=1e-5)


def test_samples_do_not_depend_on_rollout_batch_size() -> None:
    learner, batch, objective = (
        toys.policy("causal"),
        toys.pictures(8, 1, 0),
        TeacherForcedGRPO(group_size=4, token_noise=0.5),
    )
    whole = toys.context(learner, 8, spec=MseReward())
    one, other = (objective.collect(replace(whole, rollout_batch_size=chunk), batch) for chunk in (None, 12))
    assert one.samples.equal(other.samples)
    torch.testing.assert_close(one.log_prob, other.log_prob)


def test_token_noise_rate() -> None:
    learner, batch = toys.policy("causal"), toys.pictures(400, 1, 0)
    ctx = replace(toys.context(learner, 400, spec=MseReward()), rollout_batch_size=None)
    seen = TeacherForcedGRPO(group_size=2, token_noise=0.5).collect(ctx, batch)
    other = float((seen.context[:, 0] != seen.clean).float().mean())
    assert abs(other - 0.5 * 7 / 8) < 4 * 0.5 / 6400**0.5  # one code in eight is the same


def test_emulated_bugs_change_the_first_ratio(golden: dict[str, Tensor]) -> None:
    learner = policy(golden)
    shape = GPTConfig(64, 2, 4, None, 96, 4, "class", 1, 10, dropout=0.1)
    batch = ImageBatch(("3", "9"), golden["in.gt_tokens"].view(2, 1, 1, 4, 4).repeat(1, 1, 3, 1, 1) / 95)
    outside = {}
    for fault in ((), ("sampled_context",), ("dropout",)):
        if fault == ("dropout",):
            kept = learner.model.net.state_dict()
            learner.model.net = GPT(shape)
            learner.model.net.load_state_dict(kept)
        objective = TeacherForcedGRPO(emulate_bugs=fault)  # type: ignore[arg-type]
        ctx = replace(context(learner), rubric=toys.rubric(MseReward()))
        seen = objective.collect(ctx, batch)
        outside[fault] = float(objective.loss(ctx, seen, None).metrics["clip_fraction"].mean())
    # As reported of the first trainer: all but the first of 16 tokens, and all.
    assert outside[()] == 0
    assert outside[("sampled_context",)] == pytest.approx(15 / 16, abs=0.02)
    assert outside[("dropout",)] > 0.95


@pytest.mark.parametrize("rollouts_only", [False, True])
def test_guided_samples_have_a_first_ratio_of_one(rollouts_only: bool) -> None:
    learner = toys.policy("causal", snapshots=("reference",), guidance=Guidance(2.0, rollouts_only=rollouts_only))
    ctx, objective = toys.context(learner, 8), GRPO(group_size=4, kl_coef=0.1)
    seen = objective.collect(ctx, toys.prompts(8))
    loss = objective.loss(ctx, seen, 0)
    assert not loss.metrics["ratio_deviation"].any()
    assert not loss.metrics["kl"].any()
    cond = learner.model.model.embed(seen.trajectory.cond.prompts) if rollouts_only else seen.trajectory.cond
    model = learner.model.model if rollouts_only else learner.model
    (segment,) = seen.trajectory.segments
    wanted = model.predict(segment.state, segment.t, cond).log_softmax(-1).gather(-1, segment.action[..., None])
    torch.testing.assert_close(segment.log_prob, wanted[..., 0].detach(), rtol=1e-4, atol=1e-5)


def test_emulated_bugs_are_warned_about() -> None:
    settings = ["objective.ce_coef=0", "objective.emulate_bugs=[sampled_context, dropout]"]
    with pytest.warns(UserWarning, match="is on") as told:
        build(load("teacher-forced-grpo-toy-causal", settings))
    assert ["'dropout' is on" in str(each.message) for each in told] == [False, True]


def test_displayed_samples_are_scored_against_images(tmp_path: Path) -> None:
    run = build(load("teacher-forced-grpo-toy-causal", ["steps=1"]), tmp_path)
    seen = [event for event in train(run) if isinstance(event, SamplesGenerated)]
    assert [{"mse"} == event.scores.keys() for event in seen] == [True, True]


def test_dropout_is_refused_with_log_probs() -> None:
    for recipe in ("grpo-llamagen", "grpo-llamagen-tf"):
        (found,) = find_problems(load(recipe, ["model.dropout=0.1"]))
        assert found.startswith("model.dropout: 0.1, but the objective trains log-probabilities")
    assert find_problems(load("grpo-llamagen-tf", ["model.dropout=0.1", "objective.emulate_bugs=[dropout]"])) == []
    assert find_problems(load("llamagen-pretrain")) == []


def test_teacher_forced_grpo_needs_rewards() -> None:
    (found,) = find_problems(load("teacher-forced-grpo-toy-causal", ["rewards.mse.weight=0"]))
    assert found.startswith("rewards: ") and "weight 0" in found


def test_plan_of_teacher_forced_grpo() -> None:
    counts = compute_step_counts(load("grpo-llamagen-tf"))
    assert (counts.samples, counts.rollout_network_calls, counts.minibatch_size) == (256, 32, 1)


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
