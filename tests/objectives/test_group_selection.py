"""Groups in rollouts: rewards of whole groups in any rollout batch, the filter of groups, and selection from a pool."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import toys
from torch import Tensor

from tastemaker.config.build import build
from tastemaker.config.check import require_valid
from tastemaker.config.load import load
from tastemaker.config.step_counts import compute_step_counts
from tastemaker.core.group_selection import GroupFilter, PoolSelection
from tastemaker.core.objective import Context, Objective, rollout_and_score
from tastemaker.core.policy import Policy
from tastemaker.core.randomness import Randomness
from tastemaker.core.registry import ConfigError
from tastemaker.core.reward import RewardSpec, Rubric, WeightedReward
from tastemaker.core.types import Condition, Placement, Trajectory, concatenate, select_rows
from tastemaker.diagnostics.doctor import run_doctor
from tastemaker.objectives.advantages import filter_weights
from tastemaker.objectives.crd import CRD
from tastemaker.objectives.dgpo import DGPO
from tastemaker.objectives.elbo_grpo import ElboGRPO
from tastemaker.objectives.grpo import GRPO
from tastemaker.objectives.nft import NFT
from tastemaker.objectives.online_dpo import OnlineDPO
from tastemaker.objectives.ram import RAM
from tastemaker.objectives.teacher_forced_grpo import TeacherForcedGRPO
from tastemaker.processes.dynamics import ODE
from tastemaker.rewards.color import ColorReward
from tastemaker.rewards.group import GroupDiversityReward, WinRateReward
from tastemaker.rewards.wrappers import ShuffledReward
from tastemaker.training.events import GuardChecked, SamplesGenerated, StepCompleted
from tastemaker.training.loop import train, train_step

WINS = WinRateReward(ColorReward())
BATCHES: list[int] = []  # sizes of the batches that a RowPolicy sampled
KEEP = PoolSelection(best=2, worst=2, pool_size=12, pool_num_steps=3)


def deterministic(policy: Policy[Any]) -> Policy[Any]:
    """The policy with an ODE sampler."""
    return replace(policy, process=replace(policy.process, dynamics=ODE()))


def group_context(policy: Policy[Any], rows: int, *specs: RewardSpec, batch_size: int | None = None) -> Context[Any]:
    rewards = {type(spec).__name__: WeightedReward(spec, spec.load(Placement())) for spec in specs}
    return replace(toys.context(policy, rows), rubric=Rubric(rewards), rollout_batch_size=batch_size)


class RowPolicy(Policy[Any]):
    """A policy that samples each row by itself, so that a sample does not depend on its batch to the bit."""

    def sample(self, cond: Condition, rng: Randomness) -> Trajectory:
        BATCHES.append(len(cond))
        return concatenate(
            [super(RowPolicy, self).sample(*select_rows((cond, rng), row)) for row in torch.arange(len(cond)).split(1)]
        )


def test_rollout_batches_do_not_cut_groups() -> None:
    toy, batch, rewards = toys.policy("flow"), toys.prompts(4), (WINS, GroupDiversityReward(), ColorReward())
    policy = RowPolicy(toy.model, replace(toy.process, num_steps=2), toy.weights)
    trajectory, _, expected = rollout_and_score(group_context(policy, 4, *rewards), batch, 6)
    groups = expected.rewards["WinRateReward"].view(4, 6)
    assert groups.sort(1).values[0].tolist() == pytest.approx([0, 0.2, 0.4, 0.6, 0.8, 1])
    for size in (1, 4, 5, 6, 7, 13, 100):
        BATCHES.clear()
        chunked, _, scores = rollout_and_score(group_context(policy, 4, *rewards, batch_size=size), batch, 6)
        assert max(BATCHES) <= size and sum(BATCHES) == 24
        assert chunked.final.equal(trajectory.final) and chunked.cond.prompts == trajectory.cond.prompts
        assert scores.total.equal(expected.total)
        assert all(value.equal(scores.rewards[name]) for name, value in expected.rewards.items())


def test_filter_rules_by_hand() -> None:
    rewards = torch.tensor([[1.0, 1.0], [0.5, 0.5], [1.0, 0.9], [0.2, 0.8], [1.5, 0.7]])
    # Standard deviations 0, 0, .05, .3, .4; means 1, .5, .95, .5, 1.1.
    both, either = (GroupFilter(min_std=0.051, max_mean=0.9, rule=rule) for rule in ("both", "either"))
    assert both.keeps(rewards).tolist() == [False, True, False, True, True]
    assert either.keeps(rewards).tolist() == [False, False, False, True, False]


def drop_some(objective: Any, ctx: Context[Any], batch: Any) -> tuple[Any, Tensor]:
    """A filter that leaves out some of the groups of this step, and which it keeps."""
    rewards = objective.collect(ctx, batch).reward.view(len(batch), -1)
    middle = float(rewards.mean(1).median()) + 1e-6
    group_filter = GroupFilter(min_std=100.0, max_mean=middle)  # every spread is low
    return replace(objective, filter_groups=group_filter), rewards.mean(1) < middle


@pytest.mark.parametrize(
    ("objective", "family"),
    [
        (GRPO(group_size=4, kl_coef=0.1), "flow"),
        (NFT(group_size=4), "flow"),
        (DGPO(group_size=4, num_timesteps=2), "flow"),
        (CRD(group_size=4, num_timesteps=2), "flow"),
        (TeacherForcedGRPO(group_size=4), "causal"),
    ],
    ids=["grpo", "nft", "dgpo", "crd", "teacher-forced"],
)
def test_filtered_groups_do_not_train_and_the_others_share_the_mean(
    objective: Objective[Any, Any, Any, Any], family: str
) -> None:
    policy = toys.policy(family, snapshots=objective.snapshots())
    ctx, batch = toys.context(policy, 8), toys.make_batch(objective, 8, policy.model.pixels)
    filtered, kept = drop_some(objective, ctx, batch)
    plain, experience = objective.collect(ctx, batch), filtered.collect(ctx, batch)
    toys.perturb(policy, 0.01)
    assert 0 < int(kept.sum()) < 8
    losses, all_losses = (toys.total_loss(objective, ctx, each).detach() for each in (experience, plain))
    rows = kept.repeat_interleave(len(losses) // 8)
    assert bool((losses[~rows] == 0).all())
    torch.testing.assert_close(losses.mean(), all_losses[rows].mean())
    assert float(objective.metrics(experience)["kept_groups"].mean()) == float(kept.float().mean())


def test_average_over_all_samples_leaves_the_weights_of_kept_groups_at_one() -> None:
    policy = toys.policy("flow")
    ctx, reward = toys.context(policy, 4), torch.tensor([1.0, 1.0, 0.2, 0.8])
    for average, expected in (("kept", [0.0, 0.0, 2.0, 2.0]), ("all", [0.0, 0.0, 1.0, 1.0])):
        weight = filter_weights(ctx, reward, 2, GroupFilter(average=average))
        assert weight is not None and weight.tolist() == expected
    assert filter_weights(ctx, reward, 2, None) is None


def test_online_dpo_forms_pairs_of_the_groups_that_are_kept() -> None:
    objective = OnlineDPO(group_size=4)
    policy = toys.policy("flow", snapshots=objective.snapshots())
    ctx, batch = toys.context(policy, 8), toys.prompts(8)
    group_filter = GroupFilter(min_std=100.0, max_mean=float(objective.collect(ctx, batch).reward.median()) + 1e-6)
    experience = replace(objective, filter_groups=group_filter).collect(ctx, batch)
    kept = experience.reward < group_filter.max_mean
    assert experience.weight.tolist() == pytest.approx((kept * 8 / kept.sum()).tolist())
    assert objective.metrics(experience)["kept_groups"].tolist() == kept.tolist()


def test_no_group_left_is_a_step_without_gradient() -> None:
    objective = NFT(group_size=4, filter_groups=GroupFilter(min_std=100.0, max_mean=-100.0))
    policy = toys.policy("flow", snapshots=objective.snapshots())
    ctx = toys.context(policy, 8)
    experience = objective.collect(ctx, toys.prompts(8))
    assert toys.total_loss(objective, ctx, experience).tolist() == [0.0] * 32


def test_best_and_worst_of_each_pool_are_picked() -> None:
    keep = PoolSelection(best=2, worst=1, pool_size=5, pool_num_steps=1)
    rewards = torch.tensor([0.3, 0.9, 0.1, 0.5, 0.7, 1.0, 2.0, 2.0, 0.0, 3.0])
    assert keep.pick(rewards).tolist() == [1, 4, 2, 9, 6, 8]  # of equal rewards, the first


SELECTING = [kind(group_size=4, keep=KEEP) for kind in (NFT, OnlineDPO, RAM, ElboGRPO, DGPO, CRD)]


@pytest.mark.parametrize("objective", SELECTING, ids=lambda objective: type(objective).__name__)
def test_selected_samples_equal_a_plain_rollout_of_the_same_rows(objective: Any) -> None:
    policy, batch = deterministic(toys.policy("flow", snapshots=objective.snapshots())), toys.prompts(8)
    ctx = group_context(policy, 8, ColorReward(), batch_size=4)
    trajectory, rng, scores = rollout_and_score(ctx, batch, 4, KEEP)
    everything, all_rows, all_scores = rollout_and_score(ctx, batch, 12)
    index = torch.tensor([all_rows.rows.tolist().index(row) for row in rng.rows.tolist()])
    plain = select_rows(everything, index)
    assert trajectory.final.equal(plain.final) and trajectory.start.equal(plain.start)
    assert trajectory.cond.prompts == plain.cond.prompts
    assert scores.total.equal(all_scores.total[index])
    # The pool sees the same noise with fewer steps, and its rewards decide.
    few = replace(policy, process=policy.process.with_num_steps(3))
    _, _, preview = rollout_and_score(replace(ctx, policy=few), batch, 12)
    chosen = preview.total[index].view(8, 4)
    assert bool((chosen[:, :2].amin(1) >= preview.total.view(8, 12).median(1).values).all())
    assert bool((chosen[:, 2:].amax(1) <= preview.total.view(8, 12).median(1).values).all())
    torch.testing.assert_close(scores.pool["pool/reward"], preview.total.view(8, 12).mean(1).repeat_interleave(4))
    experience = objective.collect(ctx, batch)
    metrics = objective.metrics(experience)
    assert 0.5 < float(metrics["pool/rank_correlation"].mean()) <= 1
    assert float(metrics["reward/mean"].mean()) == pytest.approx(float(scores.total.mean()))


def test_steps_of_a_pool_are_counted(tmp_path: Path) -> None:
    settings = ["steps=1", "sample.every=0", "guard.every=0", "batch.prompts=4", "batch.rollout_batch_size=10"]
    config = load("nft-select-toy-flow", settings)
    counts = compute_step_counts(config)
    assert (counts.samples, counts.rollout_network_calls) == (4 * (24 + 8), 4 * (24 * 4 + 8 * 10))
    assert counts.minibatch_size == 4 * 8
    guided = compute_step_counts(load("nft-select-toy-flow", [*settings, "guidance.scale=2"]))
    assert guided.rollout_network_calls == 2 * counts.rollout_network_calls
    run, calls = build(config, tmp_path), [0]
    predict = run.policy.model.predict

    def count_calls(x: Tensor, t: Tensor, cond: Any) -> Tensor:
        calls[0] += len(x) if not torch.is_grad_enabled() else 0
        return predict(x, t, cond)

    run.policy.model.predict = count_calls  # type: ignore[method-assign]
    run.objective.collect(run.context(0, 4), run.data.batch(0, 4, 0, 1))
    assert calls[0] == counts.rollout_network_calls
    event = train_step(run, 0).to_event()
    assert event.samples == counts.samples and 0 < event.metrics["pool/rank_correlation"] <= 1
    run.engine.close()


@pytest.mark.parametrize(
    ("override", "code"),
    [
        ("process.dynamics={type: flow_sde}", "TM1594"),
        ("objective.keep.pool_num_steps=11", "TM1595"),
        ("objective.keep.pool_size=7", "TM1590"),
        ("objective.group_size=6", "TM1591"),
    ],
)
def test_selections_that_cannot_work_are_refused(override: str, code: str) -> None:
    with pytest.raises(ConfigError, match=code):
        require_valid(load("nft-select-toy-flow", [override]))


def test_guard_and_samples_score_single_samples_by_the_reward_inside(tmp_path: Path) -> None:
    settings = ["steps=1", "batch.prompts=4", "guard={every: 1, prompts: 4, samples_per_prompt: 2}", "sample.every=1"]
    run = build(load("grpo-win-rate-toy-flow", settings), tmp_path)
    events = list(train(run))
    guard = [event for event in events if isinstance(event, GuardChecked)][-1]
    samples = [event for event in events if isinstance(event, SamplesGenerated)][-1]
    step = next(event for event in events if isinstance(event, StepCompleted))
    assert step.metrics["rewards/wins"] == pytest.approx(0.5) and step.metrics["rewards/diversity"] > 0
    assert (
        guard.metrics["rewards/wins"] == guard.metrics["rewards/color"] == pytest.approx(guard.metrics["reward/mean"])
    )
    assert samples.scores.keys() == {"wins", "color"} and samples.scores["wins"] == samples.scores["color"]
    assert run.guard_history.held_out == ("rewards/color",)


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.parametrize(
    "recipe", ["nft-select-toy-flow", "dgpo-toy-flow", pytest.param("crd-toy-flow", marks=pytest.mark.long)]
)
def test_selection_filter_and_group_rewards_resume_exactly_and_do_not_depend_on_ranks(recipe: str) -> None:
    settings = [
        "objective.group_size=8",
        "objective.keep={best: 4, worst: 4, pool_size: 24, pool_num_steps: 4}",
        "batch.prompts=4",
        "batch.rollout_batch_size=5",
        "objective.filter_groups={rule: either, max_mean: 1.2}",
    ]
    settings += ["rewards.wins={type: win_rate, reward: {type: color}, opponents: 4}"]
    results = list(run_doctor(load(recipe, settings)))
    assert [result for result in results if result.verdict == "fail"] == []
    passed = {result.name for result in results if result.verdict == "pass"}
    assert {"resume reproduces the next losses bit for bit", "two ranks give the gradient of one"} <= passed


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["win rate", "shuffled win rate", "selection"])
def test_win_rates_and_selections_learn_and_shuffled_win_rates_do_not(kind: str) -> None:
    objective: Any = GRPO(group_size=16, clip_range=1e-3)
    spec: RewardSpec = WINS if kind == "win rate" else WinRateReward(ShuffledReward(ColorReward()))
    if kind == "selection":
        objective, spec = NFT(group_size=4, kl_coef=0.1, keep=KEEP), ColorReward()
    policy = toys.pretrained_policy("flow", snapshots=objective.snapshots())
    policy = deterministic(policy) if kind == "selection" else policy
    before = toys.true_rewards(policy)
    steps, rows, lr = (45, 16, 3e-4) if kind == "selection" else (45, 4, 1e-3)
    toys.train(policy, objective, (toys.prompts(rows) for _ in range(steps)), lr, spec)
    z_score = toys.z_score(before, toys.true_rewards(policy))
    assert (z_score < 3) if kind == "shuffled win rate" else (z_score > 3), z_score
