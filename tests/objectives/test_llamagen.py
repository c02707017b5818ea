"""Losses and gradients on a tiny LlamaGen are those of its published trainers."""

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
from tastemaker.core.policy import Guidance, Policy
from tastemaker.core.randomness import Randomness
from tastemaker.core.types import Condition, ImageBatch, Metadata, Prompts, Segment
from tastemaker.core.weights import FullWeights
from tastemaker.models.nets.gpt import GPT, GPTConfig, KVCache
from tastemaker.objectives.advantages import group_advantages
from tastemaker.objectives.cca import CCA, ContrastivePairs
from tastemaker.objectives.forced_grpo import TeacherForcedGRPO
from tastemaker.objectives.grpo import GRPO
from tastemaker.objectives.teacher_forcing import TeacherForcedSamples
from tastemaker.objectives.token_noise import sample_token_mask
from tastemaker.processes.autoregressive import AutoregressiveProcess
from tastemaker.rewards.target_image import Mse
from tastemaker.training.events import SamplesGenerated
from tastemaker.training.loop import train

LLAMAGEN = Path(__file__).parent.parent / "fixtures" / "llamagen"
PUBLISHED: dict[str, TeacherForcedGRPO] = {
    "gtctx_clip1e-4": TeacherForcedGRPO(group=4, clip=1e-4),
    "gtctx_clip0.2": TeacherForcedGRPO(group=4, clip=0.2),
    "gtctx_clip0.2_kl0.01_ce0.1": TeacherForcedGRPO(group=4, clip=0.2, kl=0.01, prior=0.1),
    "seed_first_commit_sampledctx_clip1e-4": TeacherForcedGRPO(group=4, clip=1e-4, faults=("sampled_context",)),
    "noisyctx_clip0.2_ce0.1": TeacherForcedGRPO(group=4, clip=0.2, prior=0.1, noise=0.5),
}


class Recorded:
    """The tiny LlamaGen of the recordings; prompts are the numbers of classes, the last of which is none."""

    shape, pixels, passes = (16,), (1, 3, 4, 4), 1

    def __init__(self) -> None:
        self.net: nn.Module = GPT(GPTConfig(64, 2, 4, None, 96, 4, "class", 1, 10))

    def embed(self, prompts: Prompts, facts: Sequence[Metadata] = ()) -> Condition:
        return Condition(tuple(prompts), {"label": torch.tensor([int(p or 10) for p in prompts])}, tuple(facts))

    def predict(self, x: Tensor, t: Tensor, cond: Condition) -> Tensor:
        logits: Tensor = self.net(x[:, :-1], cond.tensors["label"])[0]
        return logits

    def begin(self, cond: Condition) -> KVCache:
        return ()

    def extend(self, ids: Tensor | None, cache: KVCache, cond: Condition) -> tuple[Tensor, KVCache]:
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
    advantage = group_advantages(reward, 4, objective.unbiased, objective.floor).clamp(
        -objective.limit, objective.limit
    )
    cond = learner.embed([str(label) for label in golden["in.cls"].tolist()])
    read = noisy if objective.noise else clean
    return TeacherForcedSamples(
        cond, clean, read[:, None], tokens, old, rng, reward.view(shape), advantage.view(shape), {}
    )


@pytest.mark.parametrize("name", PUBLISHED)
def test_losses_and_gradients_are_those_of_the_published_trainer(golden: dict[str, Tensor], name: str) -> None:
    learner, objective = policy(golden), PUBLISHED[name]
    loss = objective.loss(context(learner), experience(learner, golden, objective), None)
    torch.testing.assert_close(loss.rows.mean(), golden[f"out.{name}.loss"][0], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(loss.metrics["ratio"], golden[f"out.{name}.ratio"].mean(1), rtol=1e-4, atol=0)
    found = toys.gradient(learner, loss.rows.mean()).norm()
    torch.testing.assert_close(found, golden[f"out.{name}.grad_norm"][0], rtol=1e-4, atol=1e-5)


def test_the_loss_is_the_mean_of_the_published_one_over_tokens_that_are_not_left_out(golden: dict[str, Tensor]) -> None:
    learner, objective = policy(golden), TeacherForcedGRPO(group=4, clip=0.2, skip=0.5)
    seen, each = experience(learner, golden, objective), golden["out.gtctx_clip0.2.per_token_loss"]
    found = []
    for epoch in (0, 1):
        kept = sample_token_mask(seen.rng, seen.drawn, 0.5, epoch).flatten(0, 1)
        loss = objective.loss(replace(context(learner), epoch=epoch), seen, None)
        wanted = ((each * kept).sum(1) / kept.sum(1)).view(2, 4).mean(1)
        torch.testing.assert_close(loss.rows.detach(), wanted, rtol=1e-4, atol=1e-5)
        found.append(loss.rows)
    assert not found[0].equal(found[1])  # others each time


@torch.no_grad()
def test_log_probabilities_with_and_without_guidance_are_the_published_ones(golden: dict[str, Tensor]) -> None:
    learner, tokens = policy(golden), golden["in.sampled_tokens"]
    ends = torch.ones(8)
    segment = Segment(ends, 0 * ends, tokens, tokens, tokens, tokens)
    for model, name in ((learner.model, "nocfg"), (GuidedCausalBackbone(learner.model, Guidance(2.0)), "cfg2")):
        cond = model.embed([str(label) for label in golden["in.cls"].tolist()]).repeat(4)
        found = learner.process.decide(model, cond, segment).log_prob(tokens)
        torch.testing.assert_close(found, golden[f"out.{name}_logps"], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("form", ["cca", "dpo"])
def test_contrasts_of_conditions_are_the_published_ones(golden: dict[str, Tensor], form: Any) -> None:
    learner = policy(golden)
    right, wrong = (learner.embed([str(i) for i in golden[f"in.{name}"].tolist()]) for name in ("cls", "neg_cls"))
    seen = ContrastivePairs(
        right, wrong, golden["in.gt_tokens"], torch.zeros(2, dtype=torch.bool), context(learner).rng
    )
    loss = CCA(form=form).loss(context(learner), seen, None)
    torch.testing.assert_close(loss.rows.mean(), golden[f"out.{form}.loss"][0], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(loss.metrics["right"], golden["out.cca.gap_pos"], rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(loss.metrics["wrong"], golden["out.cca.gap_neg"], rtol=1e-3, atol=1e-4)


def test_a_picture_without_its_condition_is_only_made_likelier(golden: dict[str, Tensor]) -> None:
    learner = policy(golden)
    cond = learner.embed(["", ""])
    for form in ("cca", "dpo"):
        seen = ContrastivePairs(
            cond, cond, golden["in.gt_tokens"], torch.ones(2, dtype=torch.bool), context(learner).rng
        )
        loss = CCA(beta=0.5, against=10.0, form=form).loss(context(learner), seen, None)  # type: ignore[arg-type]
        alone = torch.nn.functional.softplus(-0.5 * loss.metrics["right"])
        torch.testing.assert_close(loss.rows.detach(), alone / (10 if form == "cca" else 1))


def test_the_wrong_condition_is_the_next_pictures() -> None:
    learner = toys.policy("causal", snapshots=("reference",))
    batch = toys.pictures(8, 1, 0)
    seen = CCA(drop=0.0).collect(toys.context(learner, 8), batch)
    others = batch.prompts[1:] + batch.prompts[:1]
    assert seen.right.prompts == batch.prompts
    assert seen.wrong.prompts == others
    assert seen.alone.tolist() == [one == other for one, other in zip(batch.prompts, others, strict=True)]


def test_before_the_first_update_every_ratio_is_one_and_the_loss_is_nought() -> None:
    """Advantages of a group add up to nothing, and at a ratio of one so do its losses."""
    learner = toys.policy("causal")
    for objective in (TeacherForcedGRPO(), TeacherForcedGRPO(noise=0.5)):
        ctx = toys.context(learner, 8, spec=Mse())
        seen = objective.collect(ctx, toys.pictures(8, 1, 0))
        loss = objective.loss(ctx, seen, None)
        assert not loss.metrics["ratio_off"].any()
        torch.testing.assert_close(loss.rows, torch.zeros(8), rtol=0, atol=1e-5)
        assert toys.gradient(learner, loss.rows.sum()).abs().max() > 0


def test_samples_are_drawn_by_what_the_picture_has_before_each_token() -> None:
    learner = toys.policy("causal")
    toys.move(learner, 0.3)
    ctx, batch = toys.context(learner, 8, spec=Mse()), toys.pictures(8, 1, 0)
    seen = TeacherForcedGRPO(group=512).collect(ctx, batch)
    wanted = learner.model.predict(seen.clean, torch.ones(8), seen.cond).softmax(-1)  # [B, K, V]
    found = torch.nn.functional.one_hot(seen.drawn, wanted.shape[-1]).float().mean(1)
    assert (found - wanted).abs().max() < 5 * 0.5 / 512**0.5  # standard errors of a share
    assert seen.context[:, 0].equal(seen.clean)


def test_rewards_measure_the_distance_to_the_picture() -> None:
    learner, batch = toys.policy("causal"), toys.pictures(4, 1, 0)
    seen = TeacherForcedGRPO(group=3).collect(toys.context(learner, 4, spec=Mse()), batch)
    made = learner.decode(seen.drawn.flatten(0, 1)).view(4, 3, *batch.pixels.shape[1:])
    wanted = -(made - batch.pixels[:, None]).square().flatten(2).mean(2)
    torch.testing.assert_close(seen.reward, wanted)
    torch.testing.assert_close(seen.advantage.mean(1), torch.zeros(4), rtol=0, atol=1e-5)


def test_samples_are_the_same_however_they_are_cut() -> None:
    learner, batch, objective = toys.policy("causal"), toys.pictures(8, 1, 0), TeacherForcedGRPO(group=4, noise=0.5)
    whole = toys.context(learner, 8, spec=Mse())
    one, other = (objective.collect(replace(whole, chunk=chunk), batch) for chunk in (None, 12))
    assert one.drawn.equal(other.drawn)
    torch.testing.assert_close(one.log_prob, other.log_prob)


def test_as_many_tokens_are_replaced_as_asked_for() -> None:
    learner, batch = toys.policy("causal"), toys.pictures(400, 1, 0)
    ctx = replace(toys.context(learner, 400, spec=Mse()), chunk=None)
    seen = TeacherForcedGRPO(group=2, noise=0.5).collect(ctx, batch)
    other = float((seen.context[:, 0] != seen.clean).float().mean())
    assert abs(other - 0.5 * 7 / 8) < 4 * 0.5 / 6400**0.5  # one code in eight is the same


def test_faults_of_the_first_trainer_bend_the_ratio_before_any_update(golden: dict[str, Tensor]) -> None:
    learner = policy(golden)
    shape = GPTConfig(64, 2, 4, None, 96, 4, "class", 1, 10, dropout=0.1)
    batch = ImageBatch(("3", "9"), golden["in.gt_tokens"].view(2, 1, 1, 4, 4).repeat(1, 1, 3, 1, 1) / 95)
    outside = {}
    for fault in ((), ("sampled_context",), ("dropout",)):
        if fault == ("dropout",):
            kept = learner.model.net.state_dict()
            learner.model.net = GPT(shape)
            learner.model.net.load_state_dict(kept)
        objective = TeacherForcedGRPO(faults=fault)  # type: ignore[arg-type]
        ctx = replace(context(learner), rubric=toys.rubric(Mse()))
        seen = objective.collect(ctx, batch)
        outside[fault] = float(objective.loss(ctx, seen, None).metrics["clipped"].mean())
    # As reported of the first trainer: all but the first of 16 tokens, and all.
    assert outside[()] == 0
    assert outside[("sampled_context",)] == pytest.approx(15 / 16, abs=0.02)
    assert outside[("dropout",)] > 0.95


@pytest.mark.parametrize("rollouts_only", [False, True])
def test_guided_samples_are_scored_with_a_ratio_of_one(rollouts_only: bool) -> None:
    learner = toys.policy("causal", snapshots=("reference",), guidance=Guidance(2.0, rollouts_only=rollouts_only))
    ctx, objective = toys.context(learner, 8), GRPO(group=4, kl=0.1)
    seen = objective.collect(ctx, toys.prompts(8))
    loss = objective.loss(ctx, seen, 0)
    assert not loss.metrics["ratio_off"].any()
    assert not loss.metrics["kl"].any()
    cond = learner.model.model.embed(seen.trajectory.cond.prompts) if rollouts_only else seen.trajectory.cond
    model = learner.model.model if rollouts_only else learner.model
    (segment,) = seen.trajectory.segments
    wanted = model.predict(segment.state, segment.t, cond).log_softmax(-1).gather(-1, segment.action[..., None])
    torch.testing.assert_close(segment.log_prob, wanted[..., 0].detach(), rtol=1e-4, atol=1e-5)


def test_faults_are_told_of() -> None:
    settings = ["objective.prior=0", "objective.faults=[sampled_context, dropout]"]
    with pytest.warns(UserWarning, match="is on") as told:
        build(load("forced-grpo-toy-causal", settings))
    assert ["dropout is on" in str(each.message) for each in told] == [False, True]


def test_samples_to_look_at_are_compared_with_pictures(tmp_path: Path) -> None:
    run = build(load("forced-grpo-toy-causal", ["steps=1"]), tmp_path)
    seen = [event for event in train(run) if isinstance(event, SamplesGenerated)]
    assert [{"mse"} == event.scores.keys() for event in seen] == [True, True]


def test_dropout_cannot_leak_into_a_ratio() -> None:
    for recipe in ("grpo-llamagen", "grpo-llamagen-tf"):
        (found,) = find_problems(load(recipe, ["model.dropout=0.1"]))
        assert found.startswith("model.dropout: 0.1 while log-probs are trained")
    assert find_problems(load("grpo-llamagen-tf", ["model.dropout=0.1", "objective.faults=[dropout]"])) == []
    assert find_problems(load("llamagen-pretrain")) == []


def test_rewards_are_needed_where_samples_of_pictures_are_compared() -> None:
    (found,) = find_problems(load("forced-grpo-toy-causal", ["rewards.mse.weight=0"]))
    assert "forced_grpo learns from rewards, but all of them have weight 0" in found


def test_what_a_forced_step_costs_is_told() -> None:
    told = compute_step_counts(load("grpo-llamagen-tf"))
    assert (told["samples a step"], told["network calls a step to sample"], told["rows an update"]) == (256, 32, 1)


def test_the_published_defaults_are_those_of_the_trainer() -> None:
    config = load("grpo-llamagen-tf")
    assert config.objective == TeacherForcedGRPO(group=8, clip=1e-4, limit=5.0, unbiased=True, floor=1e-8)
    assert (config.optim.lr, config.optim.weight_decay, config.optim.betas) == (1e-5, 1e-2, (0.9, 0.95))
    assert (config.optim.clip, config.batch.prompts, config.batch.updates) == (1.0, 32, 32)
    assert (config.engine.precision, config.engine.reduce, config.sample.every, config.steps) == (
        "bf16",
        "bf16",
        100,
        100,
    )
    assert config.process == AutoregressiveProcess(temperature=1.0, top_k=0, top_p=1.0)
