"""Losses of the objectives in cases that have a closed form."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import toys
from safetensors.torch import load_file
from scripted_policy import scripted_policy
from torch import Tensor

from tastemaker.core.lora import Lora
from tastemaker.core.objective import Context, NoState, Objective, ScoredRollout, SingleProcess
from tastemaker.core.randomness import Randomness
from tastemaker.core.reward import Reward, RewardCard, RewardSpec
from tastemaker.core.types import Condition, Metadata, Placement, Prompts, Segment, Trajectory, select_rows
from tastemaker.core.weights import FrozenCopyFinetuning
from tastemaker.objectives.advantages import group_advantages
from tastemaker.objectives.cca import CCA
from tastemaker.objectives.crd import CRD
from tastemaker.objectives.ddpo import DDPO
from tastemaker.objectives.dgpo import DGPO
from tastemaker.objectives.distill import Distillation, Teacher
from tastemaker.objectives.dpo import DPO
from tastemaker.objectives.elbo_grpo import ElboGRPO
from tastemaker.objectives.grpo import GRPO
from tastemaker.objectives.kto import KTO, OnlineKTO
from tastemaker.objectives.likelihood import Likelihood
from tastemaker.objectives.mapo import MaPO, OnlineMaPO
from tastemaker.objectives.nft import NFT
from tastemaker.objectives.online_dpo import OnlineDPO
from tastemaker.objectives.ram import RAM
from tastemaker.objectives.reward_gradient import RewardGradient
from tastemaker.objectives.srpo import SRPO
from tastemaker.objectives.teacher_forced_grpo import TeacherForcedGRPO
from tastemaker.processes.autoregressive import AutoregressiveProcess

FIXTURES = Path(__file__).parent.parent / "fixtures"
COLOR_SRPO = SRPO(
    num_grid_steps=8,
    timestep_range=(1, 6),
    num_train_timesteps=100,
    positive_words=(" ",),
    negative_words=("grey",),
    template="{prompt} {word}",
    reward_margin=None,
)
OBJECTIVES: list[Objective[Any, Any, Any, Any]] = [
    Likelihood(),
    RewardGradient(last_steps=2),
    RewardGradient(gradient_mode="renoise"),
    RewardGradient(gradient_mode="leap"),
    COLOR_SRPO,
    DDPO(),
    GRPO(group_size=4),
    GRPO(group_size=4, kl_coef=0.1),
    GRPO(group_size=4, kl_coef=0.1, kl_estimator="exact"),
    DPO(num_timesteps=2),
    DPO(noise_sharing="independent", sft_coef=0.5),
    OnlineDPO(num_timesteps=2),
    GRPO(group_size=4, trust="none", time_weighting="uniform"),
    ElboGRPO(group_size=4, clip_range=0.2),
    ElboGRPO(group_size=4, clip_range=0.2, ratio="none", loss_type="epg", norm_guard_coef=0.0, old_kl_coef=0.1),
    NFT(group_size=4),
    RAM(group_size=4, num_timesteps=2),
    DGPO(group_size=4, num_timesteps=2),
    CRD(group_size=4, num_timesteps=2),
    TeacherForcedGRPO(group_size=4),
    TeacherForcedGRPO(group_size=4, clip_range=0.2, kl_coef=0.1, ce_coef=0.1, token_noise=0.5),
    TeacherForcedGRPO(
        group_size=4, clip_range=0.2, ce_coef=0.1, own_token_ratio=0.5, token_dropout=0.5, prompt_dropout=0.1
    ),
    CCA(),
    CCA(loss_type="dpo"),
    KTO(beta=10.0, num_timesteps=2),
    KTO(beta=1.0, utility="loss_averse", reference_point="mismatched", dislike_weight=2.0, shared_noise=True),
    OnlineKTO(beta=1.0, group_size=4, utility="risk_seeking"),
    MaPO(num_timesteps=2),
    OnlineMaPO(noise_sharing="independent"),
    Distillation({"guided": Teacher(guidance_scale=2.0), "strong": Teacher(guidance_scale=4.0)}),
]
POLICY_GRADIENT = [
    GRPO(group_size=4),
    DDPO(),
    GRPO(group_size=4, kl_coef=0.3),
    GRPO(group_size=4, kl_coef=0.3, kl_estimator="exact"),
]
GROUP_BASED = [
    GRPO(group_size=12, advantage_eps=1e-8),
    GRPO(group_size=12, advantage="group_mean"),
    OnlineDPO(group_size=12),
    RAM(group_size=12, num_timesteps=1),
    DGPO(group_size=12, num_timesteps=1),
    CRD(group_size=12, num_timesteps=1),
]
CASES = [
    pytest.param(i, name, id=f"{type(objective).__name__}{i}-{name}")
    for i, objective in enumerate(OBJECTIVES)
    for name, family in toys.FAMILIES.items()
    if isinstance(family.process, objective.needs)
]


@cache
def cached_experience(index: int, name: str) -> tuple[Context[Any], Any]:
    """Return a context and experience of an objective, shared by tests that leave them unchanged."""
    return toys.policy_with_experience(OBJECTIVES[index], name)


@pytest.mark.parametrize(("index", "name"), CASES)
def test_loss_of_a_row_is_independent_of_the_batch(index: int, name: str) -> None:
    objective, (ctx, experience) = OBJECTIVES[index], cached_experience(index, name)
    indices = torch.tensor([5, 0, 2])
    with torch.no_grad():
        full, subset = (
            toys.total_loss(objective, ctx, experience),
            toys.total_loss(objective, ctx, select_rows(experience, indices)),
        )
    assert full.shape == (len(experience),)
    torch.testing.assert_close(subset, full[indices], rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize(("index", "name"), CASES)
def test_parts_and_micro_batches_sum_to_full_gradient(index: int, name: str) -> None:
    objective, (ctx, experience) = OBJECTIVES[index], cached_experience(index, name)
    full = toys.gradient(ctx.policy, toys.total_loss(objective, ctx, experience).sum())
    halves = torch.arange(len(experience)).chunk(2)
    total = torch.zeros_like(full)
    for micro_batch in (select_rows(experience, rows) for rows in halves):
        for part in objective.parts(micro_batch):
            total += toys.gradient(ctx.policy, objective.loss(ctx, micro_batch, part).rows.sum())
    assert full.abs().max() > 0
    torch.testing.assert_close(total, full, rtol=1e-3, atol=1e-4 * float(full.abs().max()))


@pytest.mark.slow
@pytest.mark.parametrize(("index", "name"), CASES)
def test_every_trainable_tensor_has_a_gradient(index: int, name: str) -> None:
    objective = OBJECTIVES[index]
    ctx, experience = toys.policy_with_experience(objective, name, Lora(rank=2))
    toys.backward(objective, ctx, experience)
    missing = [key for key, p in ctx.policy.weights.trainable().items() if p.grad is None or not p.grad.any()]
    assert missing == []


@pytest.mark.parametrize("name", toys.FAMILIES)
@pytest.mark.parametrize("objective", POLICY_GRADIENT)
def test_on_policy_loss_is_minus_the_advantage(objective: Any, name: str) -> None:
    """The ratio is one and the KL zero; all actions of a sample have equal weights, which add up to one."""
    policy = toys.policy(name, snapshots=objective.snapshots())
    ctx = toys.context(policy, 8, objective.make_state())
    experience = objective.collect(ctx, toys.prompts(8))
    assert experience.advantage.abs().max() > 0.1
    torch.testing.assert_close(toys.total_loss(objective, ctx, experience), -experience.advantage, rtol=1e-4, atol=1e-5)
    metrics = objective.loss(ctx, experience, 0).metrics
    assert (metrics["ratio"] == 1).all()
    assert not metrics["ratio_deviation"].any()
    assert not metrics["clip_fraction"].any()
    if objective.kl_coef if isinstance(objective, GRPO) else 0:
        assert not metrics["kl"].any()


def test_segments_are_weighted_by_number_of_actions() -> None:
    """A masked model reveals different numbers of tokens per step; the weight of a step is its share of the tokens."""
    policy = toys.policy("masked")
    objective, ctx = GRPO(group_size=4), toys.context(policy, 8)
    experience = objective.collect(ctx, toys.prompts(8))
    num_actions = torch.stack([segment.mask.sum(1) for segment in experience.trajectory.segments])
    assert (num_actions.sum(0) == 16).all()
    assert len(num_actions.unique()) > 1
    for part in objective.parts(experience):
        weight = objective.loss(ctx, experience, part).rows / -experience.advantage
        torch.testing.assert_close(weight, num_actions[part] / 16, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", toys.FAMILIES)
@pytest.mark.parametrize("kl_estimator", ["k3", "exact"])
def test_kl_gradient_points_to_the_reference(kl_estimator: Any, name: str) -> None:
    with_kl, almost_none = (GRPO(group_size=4, kl_coef=kl, kl_estimator=kl_estimator) for kl in (1.0, 1e-9))
    ctx, experience = toys.policy_with_experience(with_kl, name)
    losses = [toys.total_loss(o, ctx, experience) for o in (with_kl, almost_none)]
    assert (losses[0] - losses[1] > 0).all()
    assert toys.gradient(ctx.policy, (losses[0] - losses[1]).sum()).abs().max() > 0
    kl = with_kl.loss(ctx, experience, 0).metrics["kl"]
    assert (kl > 0).all()


def test_k3_and_exact_kl_agree_in_expectation() -> None:
    """k3 is an unbiased estimate of the exact KL on samples of the policy."""
    policy = toys.policy("causal", snapshots=("reference",))
    toys.perturb(policy, 0.05)
    ctx = toys.context(policy, 8)
    experience = GRPO(group_size=128).collect(ctx, toys.prompts(8))
    kl = [
        GRPO(group_size=128, kl_coef=1.0, kl_estimator=kl_estimator).loss(ctx, experience, 0).metrics["kl"]
        for kl_estimator in ("k3", "exact")
    ]
    standard_error = kl[0].std() / len(kl[0]) ** 0.5
    assert abs(kl[0].mean() - kl[1].mean()) < 4 * standard_error


@dataclass(frozen=True)
class TiedRedReward(RewardSpec, Reward):
    """A reward that gives all images of red prompts the same score."""

    batch_size: int = 1000
    card: ClassVar[RewardCard] = RewardCard(range="any", failure_modes="anything")
    differentiable = False
    modality = "video"
    runs_on = "device"

    def load(self, placement: Placement) -> TiedRedReward:
        return self

    def tiny(self) -> TiedRedReward:
        return self

    def score(self, pixels: Tensor, prompts: Prompts, metadata: Sequence[Metadata]) -> Tensor:
        brightness = pixels.mean((1, 2, 3, 4))
        return torch.where(torch.tensor(["red" in prompt for prompt in prompts]), 0.7, brightness)


@pytest.mark.parametrize("objective", GROUP_BASED)
def test_zero_std_groups_are_counted_and_have_no_gradient(objective: Any) -> None:
    policy = toys.policy("flow", snapshots=objective.snapshots())
    ctx = toys.context(policy, 4, spec=TiedRedReward())
    experience = objective.collect(ctx, toys.prompts(4))
    assert objective.metrics(experience)["zero_std_groups"] == 0.25
    red = torch.arange(len(experience) // 4)  # the first prompt is red
    tied, others = select_rows(experience, red), select_rows(experience, torch.arange(len(red), len(experience)))
    assert not toys.gradient(policy, toys.total_loss(objective, ctx, tied).sum()).any()
    assert toys.gradient(policy, toys.total_loss(objective, ctx, others).sum()).any()


def test_equal_rewards_have_zero_advantage_despite_rounding() -> None:
    for value in torch.rand(200, generator=torch.Generator().manual_seed(0)).tolist():
        assert not group_advantages(torch.full((24,), value), 24, eps=1e-8).any()


def scored_rollout(
    log_prob: Tensor, reference_log_prob: Tensor, old_log_prob: Tensor, advantage: Tensor
) -> ScoredRollout:
    """Return the experience of a scripted policy: one segment with these log-probabilities."""
    rows = len(log_prob)
    log_probs, ones = torch.stack([log_prob, reference_log_prob], -1), torch.ones(rows)
    segment = Segment(ones, 0 * ones, log_probs, log_probs, old_log_prob, torch.ones_like(old_log_prob))
    cond = Condition(("",) * rows, {}, ())
    rng = Randomness(0, 0, torch.arange(rows))
    return ScoredRollout(Trajectory(cond, log_probs, log_probs, (segment,)), rng, advantage, advantage, {})


def test_token_loss_with_kl_matches_published_trainer() -> None:
    golden = load_file(FIXTURES / "llamagen" / "ar_grpo_objective.safetensors")
    log_prob, k3 = golden["out.gtctx_clip0.2.new_logps"], golden["out.gtctx_clip0.2.k3"]
    policy = scripted_policy()
    ctx = Context(policy, toys.rubric(), Randomness(0, 0, torch.arange(8)), SingleProcess(), NoState())
    experience = scored_rollout(log_prob, golden["in.ref_logps"], golden["in.old_logps"], golden["out.advantages"])
    loss = GRPO(group_size=4, clip_range=0.2, kl_coef=0.01).loss(ctx, experience, 0)
    torch.testing.assert_close(loss.metrics["kl"], k3.mean(1), rtol=1e-4, atol=1e-6)
    expected = (golden["out.gtctx_clip0.2.per_token_loss"] + 0.01 * k3).mean(1)
    torch.testing.assert_close(loss.rows, expected, rtol=1e-4, atol=1e-6)
    mean_loss = GRPO(group_size=4, clip_range=0.2).loss(ctx, experience, 0).rows.mean()
    torch.testing.assert_close(mean_loss, golden["out.gtctx_clip0.2.loss"][0], rtol=1e-4, atol=1e-6)


def test_advantages_are_clipped() -> None:
    policy = toys.policy("flow")
    experience = replace(GRPO(group_size=8), advantage_clip=0.5).collect(toys.context(policy, 8), toys.prompts(8))
    assert float(experience.advantage.abs().max()) == 0.5


@pytest.mark.parametrize(
    "process", [AutoregressiveProcess(top_k=2), AutoregressiveProcess(top_p=0.5, recompute_log_probs=False)]
)
@pytest.mark.parametrize("kl_estimator", ["k3", "exact"])
def test_tokens_outside_top_k_have_finite_loss(kl_estimator: Any, process: AutoregressiveProcess) -> None:
    """Log-probabilities are not truncated: a token outside of the reference's top-k would have an infinite KL."""
    objective = GRPO(group_size=16, kl_coef=0.1, kl_estimator=kl_estimator)
    policy = replace(toys.policy("causal", FrozenCopyFinetuning(), objective.snapshots()), process=process)
    toys.perturb(policy, 0.3)
    ctx = toys.context(policy, 8)
    experience = objective.collect(ctx, toys.prompts(8))
    loss = objective.loss(ctx, experience, 0)
    torch.testing.assert_close(loss.metrics["ratio"], torch.ones(128), rtol=1e-4, atol=1e-4)
    assert torch.isfinite(loss.rows).all()
    assert torch.isfinite(toys.gradient(policy, loss.rows.sum())).all()
    toys.perturb(policy, 0.3)
    assert torch.isfinite(toys.gradient(policy, objective.loss(ctx, experience, 0).rows.sum())).all()
