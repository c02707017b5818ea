"""Advantages and the clipped surrogate, compared with published code."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import toys
from safetensors.torch import load_file
from torch import Tensor

from tastemaker.core.objective import Context
from tastemaker.core.randomness import Randomness
from tastemaker.core.reward import RewardNormalization, Rubric, WeightedReward
from tastemaker.core.types import PromptBatch, Segment
from tastemaker.objectives.advantages import (
    PromptTracker,
    combine_advantages,
    global_advantages,
    group_advantages,
    group_mean_advantages,
)
from tastemaker.objectives.ddpo import DDPO
from tastemaker.objectives.grpo import GRPO
from tastemaker.objectives.nft import NFT
from tastemaker.objectives.ppo import clipped_surrogate
from tastemaker.rewards.color import BrightnessReward, ColorReward

FIXTURES = Path(__file__).parent.parent / "fixtures"
LOSSES = json.loads((FIXTURES / "video" / "ddpo_dpo_losses.json").read_text())
PROMPTS, REWARDS = ("a", "b", "a", "c", "b", "a"), torch.arange(1.0, 7.0)


def by_prompt(advantage: Any) -> list[float]:
    """Return the advantages of groups of unequal size, in the order of PROMPTS."""
    advantages = [0.0] * 6
    for prompt in "abc":
        indices = [i for i, each in enumerate(PROMPTS) if each == prompt]
        for index, value in zip(indices, advantage(REWARDS[indices], len(indices)).tolist(), strict=True):
            advantages[index] = value
    return advantages


def test_group_advantages_match_flow_grpo() -> None:
    assert by_prompt(group_advantages) == pytest.approx(
        [-1.135495, -0.999933, -0.162214, 0, 0.999933, 1.297708], abs=2e-6
    )


def test_group_mean_advantages_match_flow_grpo() -> None:
    advantages = by_prompt(lambda reward, group: group_mean_advantages(reward, group, REWARDS))
    assert advantages == pytest.approx([-1.366180, -0.878259, -0.195169, 0, 0.878259, 1.561349], abs=2e-6)


def test_tracker_advantages_match_ddpo() -> None:
    advantages = PromptTracker(16, 2).advantages(PROMPTS, REWARDS, PROMPTS, REWARDS)
    assert advantages.tolist() == pytest.approx(
        [-1.135549, -0.999999, -0.162221, 0.292770, 0.999999, 1.297771], abs=2e-6
    )


def test_tracker_statistics_match_ddpo_over_rounds() -> None:
    case = LOSSES["tracker"]
    tracker = PromptTracker(case["buffer_size"], case["min_count"])
    for step in case["rounds"]:
        rewards = torch.tensor(step["rewards"])
        advantages = tracker.advantages(step["prompts"], rewards, step["prompts"], rewards)
        assert advantages.tolist() == pytest.approx(step["advantages"], rel=1e-5, abs=1e-6)


def test_tracker_state_dict_round_trip() -> None:
    case = LOSSES["tracker"]
    first, second, third = case["rounds"]
    tracker = PromptTracker(case["buffer_size"], case["min_count"])
    for step in (first, second):
        tracker.update(step["prompts"], step["rewards"])
    restored = PromptTracker(case["buffer_size"], case["min_count"])
    restored.load_state_dict(json.loads(json.dumps(tracker.state_dict())))  # the checkpoint holds plain data
    assert restored.update(third["prompts"], third["rewards"]) == tracker.update(third["prompts"], third["rewards"])


def segment(log_prob: Tensor, mask: Tensor | None = None) -> Segment:
    zeros = torch.zeros(len(log_prob))
    return Segment(zeros, zeros, zeros, zeros, log_prob, torch.ones_like(log_prob) if mask is None else mask)


def test_clipped_loss_matches_ddpo() -> None:
    case = LOSSES["ppo"]
    new, old, advantage = (torch.tensor(case[name]) for name in ("logp_new", "logp_old", "adv"))
    clipped_advantage = advantage.clamp(-case["adv_clip"], case["adv_clip"])
    objective, metrics = clipped_surrogate(new[:, None], segment(old[:, None]), clipped_advantage, case["clip_range"])
    assert float(-objective.mean()) == pytest.approx(case["loss"], rel=1e-6)
    assert float(metrics["clip_fraction"].mean()) == case["clipfrac"]
    assert float(0.5 * ((new - old) ** 2).mean()) == pytest.approx(case["approx_kl"], rel=1e-5)


def test_token_advantages_match_published_trainer() -> None:
    golden = load_file(FIXTURES / "llamagen" / "ar_grpo_objective.safetensors")
    advantages = group_advantages(golden["in.rewards"], 4, unbiased_std=True, eps=1e-8)
    torch.testing.assert_close(advantages.clamp(-5, 5), golden["out.advantages"], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("name", "clip_range", "clip_fraction"),
    [  # with the clip fraction of the published run
        ("gtctx_clip1e-4", 1e-4, 1.0),
        ("gtctx_clip0.2", 0.2, 0.0390625),
        ("seed_first_commit_sampledctx_clip1e-4", 1e-4, 1.0),
        ("noisyctx_clip0.2_ce0.1", 0.2, 0.84375),
    ],
)
def test_token_losses_match_published_trainer(name: str, clip_range: float, clip_fraction: float) -> None:
    golden = load_file(FIXTURES / "llamagen" / "ar_grpo_objective.safetensors")
    log_prob, old_log_prob = golden[f"out.{name}.new_logps"], golden["in.old_logps"]
    objective, metrics = clipped_surrogate(log_prob, segment(old_log_prob), golden["out.advantages"], clip_range)
    torch.testing.assert_close(-objective, golden[f"out.{name}.per_token_loss"], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(metrics["ratio"], golden[f"out.{name}.ratio"].mean(1), rtol=1e-5, atol=0)
    assert float(metrics["clip_fraction"].mean()) == pytest.approx(clip_fraction, abs=1e-6)


@pytest.mark.parametrize("name", ["gtctx_clip1e-4", "gtctx_clip0.2"])
def test_mean_token_loss_matches_published_trainer(name: str) -> None:
    golden = load_file(FIXTURES / "llamagen" / "ar_grpo_objective.safetensors")
    clip_range = 1e-4 if "1e-4" in name else 0.2
    objective, _ = clipped_surrogate(
        golden[f"out.{name}.new_logps"], segment(golden["in.old_logps"]), golden["out.advantages"], clip_range
    )
    torch.testing.assert_close(-objective.mean(), golden[f"out.{name}.loss"][0], rtol=1e-5, atol=1e-6)


def test_metrics_count_taken_actions_only() -> None:
    mask = torch.tensor([[1.0, 0.0], [1.0, 1.0]])
    _, metrics = clipped_surrogate(
        torch.tensor([[0.0, 9.0], [0.0, 0.1]]), segment(torch.zeros(2, 2), mask), torch.ones(2), 0.01
    )
    assert metrics["clip_fraction"].tolist() == [0, 0.5]
    assert metrics["ratio"][0] == 1


@dataclass(frozen=True)
class KnownOtherRank:
    """The communication of one of two ranks, where the samples of the other rank are known."""

    rank: int
    other_rewards: Tensor
    other_prompts: tuple[str, ...]
    world_size: int = 2

    def gather(self, x: Tensor) -> Tensor:
        parts = (x, self.other_rewards) if self.rank == 0 else (self.other_rewards, x)
        return torch.cat(parts)

    def gather_objects(self, items: Sequence[Any]) -> list[Any]:
        parts = (items, self.other_prompts) if self.rank == 0 else (self.other_prompts, items)
        return [*parts[0], *parts[1]]

    def mean(self, x: Tensor) -> Tensor:
        return x

    def any(self, flag: bool) -> bool:
        return flag


OBJECTIVES = [
    GRPO(group_size=4),
    GRPO(group_size=4, advantage="group_mean"),
    GRPO(group_size=4, advantage="global"),
    GRPO(group_size=4, advantage="tracker", tracker_min_count=3),
    DDPO(tracker_min_count=2),
    NFT(group_size=4),
]


@pytest.mark.parametrize("objective", OBJECTIVES, ids=[f"{type(o).__name__}{i}" for i, o in enumerate(OBJECTIVES)])
def test_advantages_do_not_depend_on_number_of_ranks(objective: Any) -> None:
    policy = toys.policy("flow", snapshots=objective.snapshots())
    batch = toys.prompts(8)

    def collect(rows: slice, comm: Any = None) -> Any:
        ctx = toys.context(policy, 8, objective.make_state())
        rng = Randomness(0, 0, torch.arange(8)[rows])
        ctx = Context(policy, ctx.rubric, rng, comm or ctx.comm, ctx.state)
        return objective.collect(ctx, PromptBatch(batch.prompts[rows], batch.metadata[rows]))

    full = collect(slice(0, 8))
    half = len(full) // 2
    prompts = full.trajectory.cond.prompts
    for rank, own_prompts, own_samples in ((0, slice(0, 4), slice(0, half)), (1, slice(4, 8), slice(half, None))):
        other_samples = slice(half, None) if rank == 0 else slice(0, half)
        result = collect(own_prompts, KnownOtherRank(rank, full.reward[other_samples], prompts[other_samples]))
        torch.testing.assert_close(result.reward, full.reward[own_samples], rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(result.advantage, full.advantage[own_samples], rtol=1e-3, atol=1e-3)


def test_global_advantages_use_all_rewards() -> None:
    all_rewards = torch.cat([REWARDS, REWARDS + 10])
    advantages = global_advantages(REWARDS, all_rewards, 0.0)
    torch.testing.assert_close(advantages, (REWARDS - all_rewards.mean()) / all_rewards.std(correction=0))


def two_rewards(weights: tuple[float, float], **settings: Any) -> Rubric:
    rewards = [WeightedReward(BrightnessReward(), BrightnessReward(), weight) for weight in weights]
    return Rubric({"near": rewards[0], "far": replace(rewards[1], **settings)})


def test_combined_advantages_are_weighted_means() -> None:
    # Groups of two: (0, 2) has mean 1 and std 1, (30, 10) has mean 20 and std 10; equal rewards have no advantage.
    rewards = {"near": torch.tensor([0.0, 2.0, 5.0, 5.0]), "far": torch.tensor([30.0, 10.0, 0.0, 4.0])}
    advantages = combine_advantages(
        two_rewards((3.0, 1.0)), rewards, lambda reward: group_advantages(reward, 2, eps=0.0)
    )
    assert advantages[:2].tolist() == pytest.approx([0.75 * -1 + 0.25 * 1, 0.75 * 1 + 0.25 * -1])
    advantages = combine_advantages(
        two_rewards((3.0, 1.0)), rewards, lambda reward: group_advantages(reward, 2, eps=1e-9)
    )
    assert advantages[2:].tolist() == pytest.approx([0.25 * -1, 0.25 * 1])
    # In a sum of rewards the larger range decides: 3 * (0, 2) + (30, 10) prefers the first sample.
    total = 3 * rewards["near"] + rewards["far"]
    assert group_advantages(total, 2)[:2].tolist() == pytest.approx([1.0, -1.0], abs=1e-3)


def test_negative_weight_flips_advantage_and_zero_weight_has_none() -> None:
    rewards = {"near": torch.tensor([0.0, 2.0]), "far": torch.tensor([30.0, 10.0])}
    advantages = combine_advantages(
        two_rewards((-1.0, 0.0)), rewards, lambda reward: group_advantages(reward, 2, eps=0.0)
    )
    assert advantages.tolist() == pytest.approx([1.0, -1.0])


def test_scores_are_normalized_and_clipped_before_combining() -> None:
    rubric = two_rewards((1.0, 1.0), normalize=RewardNormalization(10.0, 2.0), clip=(-1.0, 3.0))
    rewards = {"near": torch.tensor([0.0, 2.0, 0.0]), "far": torch.tensor([6.0, 12.0, 20.0])}
    assert rubric.normalized(rewards)["far"].tolist() == [-1.0, 1.0, 3.0]
    assert rubric.normalized(rewards)["near"].tolist() == [0.0, 2.0, 0.0]


@pytest.mark.parametrize("objective_type", [GRPO, NFT])
def test_combine_setting_of_grpo_and_nft(objective_type: Any) -> None:
    policy = toys.policy("flow", snapshots=objective_type(group_size=4).snapshots())
    rubric = Rubric(
        {
            "color": WeightedReward(ColorReward(), ColorReward(), 1.0),
            "dark": WeightedReward(BrightnessReward(), BrightnessReward(), -20.0),
        }
    )
    experience = {}
    for combine in ("rewards", "advantages"):
        ctx = replace(toys.context(policy, 4), rubric=rubric)
        experience[combine] = objective_type(group_size=4, combine=combine).collect(ctx, toys.prompts(4))
    rewards = experience["advantages"].rewards

    def advantage(reward: Tensor) -> Tensor:
        return group_advantages(reward, 4) if objective_type is GRPO else group_mean_advantages(reward, 4, reward)

    expected = advantage(rewards["color"]) / 21 - 20 * advantage(rewards["dark"]) / 21
    torch.testing.assert_close(experience["advantages"].advantage, expected)
    torch.testing.assert_close(experience["rewards"].advantage, advantage(rewards["color"] - 20 * rewards["dark"]))
    assert experience["rewards"].reward.equal(experience["advantages"].reward)


def test_combine_setting_has_no_effect_on_one_reward() -> None:
    ctx = toys.context(toys.policy("flow"), 4)
    advantages = [
        GRPO(group_size=4, combine=combine).collect(ctx, toys.prompts(4)).advantage
        for combine in ("rewards", "advantages")
    ]
    torch.testing.assert_close(*advantages)


def test_tracker_refuses_combined_advantages() -> None:
    with pytest.raises(ValueError, match=r"'combine'.*tracker.*TM305"):
        GRPO(advantage="tracker", combine="advantages")


def test_clip_range_high_clips_upper_ratios() -> None:
    ratio, advantage = torch.tensor([[0.5, 0.95, 1.2, 1.5]] * 2), torch.tensor([1.0, -1.0])
    objective, metrics = clipped_surrogate(ratio.log(), segment(torch.zeros(2, 4)), advantage, 0.1, clip_range_high=0.3)
    torch.testing.assert_close(objective, torch.tensor([[0.5, 0.95, 1.2, 1.3], [-0.9, -0.95, -1.2, -1.5]]))
    assert metrics["clip_fraction"].tolist() == [0.5, 0.5]
