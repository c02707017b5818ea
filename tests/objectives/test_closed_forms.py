"""What losses must be where they can be worked out by hand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import toys
from safetensors.torch import load_file
from scripted_policy import scripted_policy
from torch import Tensor

from tastemaker.core.lora import Lora
from tastemaker.core.objective import Context, NoState, Objective, ScoredRollout, SingleProcess
from tastemaker.core.randomness import Randomness
from tastemaker.core.types import Condition, Metadata, Placement, Prompts, Segment, Trajectory, select_rows
from tastemaker.core.weights import FrozenCopyFinetuning
from tastemaker.objectives.advantages import group_advantages
from tastemaker.objectives.cca import CCA
from tastemaker.objectives.ddpo import DDPO
from tastemaker.objectives.dpo import DPO
from tastemaker.objectives.forced_grpo import TeacherForcedGRPO
from tastemaker.objectives.grpo import GRPO
from tastemaker.objectives.likelihood import Likelihood
from tastemaker.objectives.nft import NFT
from tastemaker.objectives.online_dpo import OnlineDPO
from tastemaker.objectives.reward_gradient import RewardGradient
from tastemaker.objectives.srpo import SRPO
from tastemaker.processes.autoregressive import AutoregressiveProcess

FIXTURES = Path(__file__).parent.parent / "fixtures"
NAMED = SRPO(grid=8, span=(1, 6), length=100, praise=(" ",), blame=("grey",), template="{prompt} {word}", margin=None)
OBJECTIVES: list[Objective[Any, Any, Any, Any]] = [
    Likelihood(),
    RewardGradient(tail=2),
    RewardGradient(through="renoised"),
    NAMED,
    DDPO(),
    GRPO(group=4),
    GRPO(group=4, kl=0.1),
    GRPO(group=4, kl=0.1, divergence="exact"),
    DPO(levels=2),
    DPO(corruption="independent", sft=0.5),
    OnlineDPO(levels=2),
    NFT(group=4),
    TeacherForcedGRPO(group=4),
    TeacherForcedGRPO(group=4, clip=0.2, kl=0.1, prior=0.1, noise=0.5),
    TeacherForcedGRPO(group=4, clip=0.2, prior=0.1, own=0.5, skip=0.5, drop=0.1),
    CCA(),
    CCA(form="dpo"),
]
REINFORCING = [GRPO(group=4), DDPO(), GRPO(group=4, kl=0.3), GRPO(group=4, kl=0.3, divergence="exact")]
COMPARING = [GRPO(group=12, floor=1e-8), GRPO(group=12, advantage="group_mean"), OnlineDPO(group=12)]
CELLS = [
    pytest.param(i, name, id=f"{type(objective).__name__}{i}-{name}")
    for i, objective in enumerate(OBJECTIVES)
    for name, family in toys.FAMILIES.items()
    if isinstance(family.process, objective.needs)
]


@cache
def ready(place: int, name: str) -> tuple[Context[Any], Any]:
    """Experience of an objective, shared by tests that take gradients and keep none."""
    return toys.policy_with_experience(OBJECTIVES[place], name)


@pytest.mark.parametrize(("place", "name"), CELLS)
def test_a_rows_loss_does_not_depend_on_other_rows(place: int, name: str) -> None:
    objective, (ctx, experience) = OBJECTIVES[place], ready(place, name)
    rows = torch.tensor([5, 0, 2])
    with torch.no_grad():
        whole, part = toys.total(objective, ctx, experience), toys.total(objective, ctx, select_rows(experience, rows))
    assert whole.shape == (len(experience),)
    torch.testing.assert_close(part, whole[rows], rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize(("place", "name"), CELLS)
def test_parts_and_microbatches_add_up_to_the_gradient(place: int, name: str) -> None:
    objective, (ctx, experience) = OBJECTIVES[place], ready(place, name)
    whole = toys.gradient(ctx.policy, toys.total(objective, ctx, experience).sum())
    halves = torch.arange(len(experience)).chunk(2)
    added = torch.zeros_like(whole)
    for mini in (select_rows(experience, rows) for rows in halves):
        for part in objective.parts(mini):
            added += toys.gradient(ctx.policy, objective.loss(ctx, mini, part).rows.sum())
    assert whole.abs().max() > 0
    torch.testing.assert_close(added, whole, rtol=1e-3, atol=1e-4 * float(whole.abs().max()))


@pytest.mark.slow
@pytest.mark.parametrize(("place", "name"), CELLS)
def test_every_trainable_tensor_learns(place: int, name: str) -> None:
    objective = OBJECTIVES[place]
    ctx, experience = toys.policy_with_experience(objective, name, Lora(rank=2))
    toys.backward(objective, ctx, experience)
    silent = [key for key, p in ctx.policy.weights.trainable().items() if p.grad is None or not p.grad.any()]
    assert silent == []


@pytest.mark.parametrize("name", toys.FAMILIES)
@pytest.mark.parametrize(
    "objective", [GRPO(group=4), DDPO(), GRPO(group=4, kl=0.3), GRPO(group=4, kl=0.3, divergence="exact")]
)
def test_at_the_sampling_weights_the_loss_is_minus_the_advantage(objective: Any, name: str) -> None:
    """The ratio is one and the divergence zero; each decision weighs the same, so that a row's add up to one."""
    policy = toys.policy(name, snapshots=objective.snapshots())
    ctx = toys.context(policy, 8, objective.memory())
    experience = objective.collect(ctx, toys.prompts(8))
    assert experience.advantage.abs().max() > 0.1
    torch.testing.assert_close(toys.total(objective, ctx, experience), -experience.advantage, rtol=1e-4, atol=1e-5)
    watched = objective.loss(ctx, experience, 0).metrics
    assert (watched["ratio"] == 1).all()
    assert not watched["ratio_off"].any()
    assert not watched["clipped"].any()
    if objective.kl if isinstance(objective, GRPO) else 0:
        assert not watched["kl"].any()


def test_segments_weigh_by_their_decisions() -> None:
    """A masked model reveals different numbers of tokens a step: a step's share of the loss is its share of tokens."""
    policy = toys.policy("masked")
    objective, ctx = GRPO(group=4), toys.context(policy, 8)
    experience = objective.collect(ctx, toys.prompts(8))
    taken = torch.stack([segment.mask.sum(1) for segment in experience.trajectory.segments])
    assert (taken.sum(0) == 16).all()
    assert len(taken.unique()) > 1
    for part in objective.parts(experience):
        share = objective.loss(ctx, experience, part).rows / -experience.advantage
        torch.testing.assert_close(share, taken[part] / 16, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", toys.FAMILIES)
@pytest.mark.parametrize("divergence", ["k3", "exact"])
def test_the_divergence_pulls_back_once_the_policy_has_left(divergence: Any, name: str) -> None:
    tied, free = (GRPO(group=4, kl=kl, divergence=divergence) for kl in (1.0, 1e-9))
    ctx, experience = toys.policy_with_experience(tied, name)
    pull = [toys.total(o, ctx, experience) for o in (tied, free)]
    assert (pull[0] - pull[1] > 0).all()
    assert toys.gradient(ctx.policy, (pull[0] - pull[1]).sum()).abs().max() > 0
    away = tied.loss(ctx, experience, 0).metrics["kl"]
    assert (away > 0).all()


def test_the_two_divergences_agree_in_the_mean() -> None:
    """k3 estimates the exact divergence without bias where the samples are the policy's own."""
    policy = toys.policy("causal", snapshots=("reference",))
    toys.move(policy, 0.05)
    ctx = toys.context(policy, 8)
    experience = GRPO(group=128).collect(ctx, toys.prompts(8))
    found = [GRPO(group=128, kl=1.0, divergence=d).loss(ctx, experience, 0).metrics["kl"] for d in ("k3", "exact")]
    error = found[0].std() / len(found[0]) ** 0.5
    assert abs(found[0].mean() - found[1].mean()) < 4 * error


@dataclass(frozen=True)
class Partly:
    """A reward that likes all pictures of red alike."""

    batch_size: int = 1000
    differentiable = False
    reads = "clip"
    runs_on = "device"

    def load(self, placement: Placement) -> Partly:
        return self

    def tiny(self) -> Partly:
        return self

    def score(self, pixels: Tensor, prompts: Prompts, facts: Sequence[Metadata]) -> Tensor:
        seen = pixels.mean((1, 2, 3, 4))
        return torch.where(torch.tensor(["red" in prompt for prompt in prompts]), 0.7, seen)


@pytest.mark.parametrize(
    "objective", [GRPO(group=12, floor=1e-8), GRPO(group=12, advantage="group_mean"), OnlineDPO(group=12)]
)
def test_groups_of_equals_are_counted_and_teach_nothing(objective: Any) -> None:
    policy = toys.policy("flow", snapshots=objective.snapshots())
    ctx = toys.context(policy, 4, spec=Partly())
    experience = objective.collect(ctx, toys.prompts(4))
    assert objective.watch(experience)["flat_groups"] == 0.25
    red = torch.arange(len(experience) // 4)  # the first prompt is red
    flat, others = select_rows(experience, red), select_rows(experience, torch.arange(len(red), len(experience)))
    assert not toys.gradient(policy, toys.total(objective, ctx, flat).sum()).any()
    assert toys.gradient(policy, toys.total(objective, ctx, others).sum()).any()


def test_equal_rewards_have_no_advantage_however_their_mean_rounds() -> None:
    for value in torch.rand(200, generator=torch.Generator().manual_seed(0)).tolist():
        assert not group_advantages(torch.full((24,), value), 24, floor=1e-8).any()


def rated(now: Tensor, reference: Tensor, old: Tensor, advantage: Tensor) -> ScoredRollout:
    """Experience in the language of `told`: one segment whose log-probabilities are known."""
    rows = len(now)
    lines, ends = torch.stack([now, reference], -1), torch.ones(rows)
    segment = Segment(ends, 0 * ends, lines, lines, old, torch.ones_like(old))
    cond = Condition(("",) * rows, {}, ())
    rng = Randomness(0, 0, torch.arange(rows))
    return ScoredRollout(Trajectory(cond, lines, lines, (segment,)), rng, advantage, advantage, {})


def test_the_token_loss_with_its_penalty_is_the_published_one() -> None:
    golden = load_file(FIXTURES / "llamagen" / "ar_grpo_objective.safetensors")
    now, k3 = golden["out.gtctx_clip0.2.new_logps"], golden["out.gtctx_clip0.2.k3"]
    policy = scripted_policy()
    ctx = Context(policy, toys.rubric(), Randomness(0, 0, torch.arange(8)), SingleProcess(), NoState())
    experience = rated(now, golden["in.ref_logps"], golden["in.old_logps"], golden["out.advantages"])
    loss = GRPO(group=4, clip=0.2, kl=0.01).loss(ctx, experience, 0)
    torch.testing.assert_close(loss.metrics["kl"], k3.mean(1), rtol=1e-4, atol=1e-6)
    wanted = (golden["out.gtctx_clip0.2.per_token_loss"] + 0.01 * k3).mean(1)
    torch.testing.assert_close(loss.rows, wanted, rtol=1e-4, atol=1e-6)
    plain = GRPO(group=4, clip=0.2).loss(ctx, experience, 0).rows.mean()
    torch.testing.assert_close(plain, golden["out.gtctx_clip0.2.loss"][0], rtol=1e-4, atol=1e-6)


def test_advantages_are_limited() -> None:
    policy = toys.policy("flow")
    limited = replace(GRPO(group=8), limit=0.5).collect(toys.context(policy, 8), toys.prompts(8))
    assert float(limited.advantage.abs().max()) == 0.5


@pytest.mark.parametrize("process", [AutoregressiveProcess(top_k=2), AutoregressiveProcess(top_p=0.5, replay=False)])
@pytest.mark.parametrize("divergence", ["k3", "exact"])
def test_tokens_that_would_no_longer_be_drawn_still_have_finite_losses(
    divergence: Any, process: AutoregressiveProcess
) -> None:
    """Truncation is for drawing: scored with it, a token outside of the reference's few likeliest is infinitely far."""
    objective = GRPO(group=16, kl=0.1, divergence=divergence)
    policy = replace(toys.policy("causal", FrozenCopyFinetuning(), objective.snapshots()), process=process)
    toys.move(policy, 0.3)
    ctx = toys.context(policy, 8)
    experience = objective.collect(ctx, toys.prompts(8))
    loss = objective.loss(ctx, experience, 0)
    torch.testing.assert_close(loss.metrics["ratio"], torch.ones(128), rtol=1e-4, atol=1e-4)
    assert torch.isfinite(loss.rows).all()
    assert torch.isfinite(toys.gradient(policy, loss.rows.sum())).all()
    toys.move(policy, 0.3)
    assert torch.isfinite(toys.gradient(policy, objective.loss(ctx, experience, 0).rows.sum())).all()
