"""Advantages and the clipped surrogate, against the published code's numbers."""

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


def groups(advantage: Any) -> list[float]:
    """Groups of unequal size, each by itself, back in the order of PROMPTS."""
    found = [0.0] * 6
    for prompt in "abc":
        rows = [i for i, other in enumerate(PROMPTS) if other == prompt]
        for row, value in zip(rows, advantage(REWARDS[rows], len(rows)).tolist(), strict=True):
            found[row] = value
    return found


def test_group_advantages_match_flow_grpo() -> None:
    assert groups(group_advantages) == pytest.approx([-1.135495, -0.999933, -0.162214, 0, 0.999933, 1.297708], abs=2e-6)


def test_group_mean_advantages_match_flow_grpo() -> None:
    found = groups(lambda reward, group: group_mean_advantages(reward, group, REWARDS))
    assert found == pytest.approx([-1.366180, -0.878259, -0.195169, 0, 0.878259, 1.561349], abs=2e-6)


def test_tracker_advantages_match_ddpo() -> None:
    found = PromptTracker(16, 2).advantages(PROMPTS, REWARDS, PROMPTS, REWARDS)
    assert found.tolist() == pytest.approx([-1.135549, -0.999999, -0.162221, 0.292770, 0.999999, 1.297771], abs=2e-6)


def test_tracker_statistics_match_ddpo_over_rounds() -> None:
    case = LOSSES["tracker"]
    tracker = PromptTracker(case["buffer_size"], case["min_count"])
    for step in case["rounds"]:
        rewards = torch.tensor(step["rewards"])
        found = tracker.advantages(step["prompts"], rewards, step["prompts"], rewards)
        assert found.tolist() == pytest.approx(step["advantages"], rel=1e-5, abs=1e-6)


def test_tracker_state_dict_round_trip() -> None:
    case = LOSSES["tracker"]
    first, second, third = case["rounds"]
    tracker = PromptTracker(case["buffer_size"], case["min_count"])
    for step in (first, second):
        tracker.update(step["prompts"], step["rewards"])
    other = PromptTracker(case["buffer_size"], case["min_count"])
    other.load_state_dict(json.loads(json.dumps(tracker.state_dict())))  # the checkpoint holds plain data
    assert other.update(third["prompts"], third["rewards"]) == tracker.update(third["prompts"], third["rewards"])


def segment(log_prob: Tensor, mask: Tensor | None = None) -> Segment:
    nothing = torch.zeros(len(log_prob))
    return Segment(nothing, nothing, nothing, nothing, log_prob, torch.ones_like(log_prob) if mask is None else mask)


def test_clipped_loss_matches_ddpo() -> None:
    case = LOSSES["ppo"]
    new, old, advantage = (torch.tensor(case[name]) for name in ("logp_new", "logp_old", "adv"))
    limited = advantage.clamp(-case["adv_clip"], case["adv_clip"])
    gain, watched = clipped_surrogate(new[:, None], segment(old[:, None]), limited, case["clip_range"])
    assert float(-gain.mean()) == pytest.approx(case["loss"], rel=1e-6)
    assert float(watched["clip_fraction"].mean()) == case["clipfrac"]
    assert float(0.5 * ((new - old) ** 2).mean()) == pytest.approx(case["approx_kl"], rel=1e-5)


def test_token_advantages_match_published_trainer() -> None:
    golden = load_file(FIXTURES / "llamagen" / "ar_grpo_objective.safetensors")
    found = group_advantages(golden["in.rewards"], 4, unbiased_std=True, eps=1e-8)
    torch.testing.assert_close(found.clamp(-5, 5), golden["out.advantages"], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("name", "clip", "off"),
    [  # with the share of tokens outside the clip that the published run reports
        ("gtctx_clip1e-4", 1e-4, 1.0),
        ("gtctx_clip0.2", 0.2, 0.0390625),
        ("seed_first_commit_sampledctx_clip1e-4", 1e-4, 1.0),
        ("noisyctx_clip0.2_ce0.1", 0.2, 0.84375),
    ],
)
def test_token_losses_match_published_trainer(name: str, clip: float, off: float) -> None:
    golden = load_file(FIXTURES / "llamagen" / "ar_grpo_objective.safetensors")
    now, old = golden[f"out.{name}.new_logps"], golden["in.old_logps"]
    gain, watched = clipped_surrogate(now, segment(old), golden["out.advantages"], clip)
    torch.testing.assert_close(-gain, golden[f"out.{name}.per_token_loss"], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(watched["ratio"], golden[f"out.{name}.ratio"].mean(1), rtol=1e-5, atol=0)
    assert float(watched["clip_fraction"].mean()) == pytest.approx(off, abs=1e-6)


@pytest.mark.parametrize("name", ["gtctx_clip1e-4", "gtctx_clip0.2"])
def test_mean_token_loss_matches_published_trainer(name: str) -> None:
    golden = load_file(FIXTURES / "llamagen" / "ar_grpo_objective.safetensors")
    clip = 1e-4 if "1e-4" in name else 0.2
    gain, _ = clipped_surrogate(
        golden[f"out.{name}.new_logps"], segment(golden["in.old_logps"]), golden["out.advantages"], clip
    )
    torch.testing.assert_close(-gain.mean(), golden[f"out.{name}.loss"][0], rtol=1e-5, atol=1e-6)


def test_metrics_count_taken_actions_only() -> None:
    mask = torch.tensor([[1.0, 0.0], [1.0, 1.0]])
    _, watched = clipped_surrogate(
        torch.tensor([[0.0, 9.0], [0.0, 0.1]]), segment(torch.zeros(2, 2), mask), torch.ones(2), 0.01
    )
    assert watched["clip_fraction"].tolist() == [0, 0.5]
    assert watched["ratio"][0] == 1


@dataclass(frozen=True)
class OneOfTwo:
    """What one of two ranks hears when the other holds known rows."""

    rank: int
    other: Tensor
    prompts: tuple[str, ...]
    world_size: int = 2

    def gather(self, x: Tensor) -> Tensor:
        both = (x, self.other) if self.rank == 0 else (self.other, x)
        return torch.cat(both)

    def gather_objects(self, items: Sequence[Any]) -> list[Any]:
        both = (items, self.prompts) if self.rank == 0 else (self.prompts, items)
        return [*both[0], *both[1]]

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

    def collected(rows: slice, comm: Any = None) -> Any:
        ctx = toys.context(policy, 8, objective.make_state())
        rng = Randomness(0, 0, torch.arange(8)[rows])
        ctx = Context(policy, ctx.rubric, rng, comm or ctx.comm, ctx.state)
        return objective.collect(ctx, PromptBatch(batch.prompts[rows], batch.metadata[rows]))

    whole = collected(slice(0, 8))
    half = len(whole) // 2
    said = whole.trajectory.cond.prompts
    for rank, mine, rows in ((0, slice(0, 4), slice(0, half)), (1, slice(4, 8), slice(half, None))):
        theirs = slice(half, None) if rank == 0 else slice(0, half)
        part = collected(mine, OneOfTwo(rank, whole.reward[theirs], said[theirs]))
        torch.testing.assert_close(part.reward, whole.reward[rows], rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(part.advantage, whole.advantage[rows], rtol=1e-3, atol=1e-3)


def test_global_advantages_use_all_rewards() -> None:
    everyone = torch.cat([REWARDS, REWARDS + 10])
    found = global_advantages(REWARDS, everyone, 0.0)
    torch.testing.assert_close(found, (REWARDS - everyone.mean()) / everyone.std(correction=0))


def two_rewards(weights: tuple[float, float], **settings: Any) -> Rubric:
    graded = [WeightedReward(BrightnessReward(), BrightnessReward(), weight) for weight in weights]
    return Rubric({"near": graded[0], "far": replace(graded[1], **settings)})


def test_combined_advantages_are_weighted_means() -> None:
    # Groups of two: (0, 2) spreads by 1 about 1, (30, 10) by 10 about 20; equals earn nothing.
    parts = {"near": torch.tensor([0.0, 2.0, 5.0, 5.0]), "far": torch.tensor([30.0, 10.0, 0.0, 4.0])}
    found = combine_advantages(two_rewards((3.0, 1.0)), parts, lambda reward: group_advantages(reward, 2, eps=0.0))
    assert found[:2].tolist() == pytest.approx([0.75 * -1 + 0.25 * 1, 0.75 * 1 + 0.25 * -1])
    found = combine_advantages(two_rewards((3.0, 1.0)), parts, lambda reward: group_advantages(reward, 2, eps=1e-9))
    assert found[2:].tolist() == pytest.approx([0.25 * -1, 0.25 * 1])
    # Summed as rewards, the larger range would have decided: 3 * (0, 2) + (30, 10) prefers the first.
    total = 3 * parts["near"] + parts["far"]
    assert group_advantages(total, 2)[:2].tolist() == pytest.approx([1.0, -1.0], abs=1e-3)


def test_negative_weight_flips_advantage_and_zero_weight_has_none() -> None:
    parts = {"near": torch.tensor([0.0, 2.0]), "far": torch.tensor([30.0, 10.0])}
    found = combine_advantages(two_rewards((-1.0, 0.0)), parts, lambda reward: group_advantages(reward, 2, eps=0.0))
    assert found.tolist() == pytest.approx([1.0, -1.0])


def test_scores_are_normalized_and_clipped_before_combining() -> None:
    rubric = two_rewards((1.0, 1.0), normalize=RewardNormalization(10.0, 2.0), clip=(-1.0, 3.0))
    parts = {"near": torch.tensor([0.0, 2.0, 0.0]), "far": torch.tensor([6.0, 12.0, 20.0])}
    assert rubric.normalized(parts)["far"].tolist() == [-1.0, 1.0, 3.0]
    assert rubric.normalized(parts)["near"].tolist() == [0.0, 2.0, 0.0]


@pytest.mark.parametrize("kind", [GRPO, NFT])
def test_combine_setting_of_grpo_and_nft(kind: Any) -> None:
    policy = toys.policy("flow", snapshots=kind(group_size=4).snapshots())
    rubric = Rubric(
        {
            "color": WeightedReward(ColorReward(), ColorReward(), 1.0),
            "dark": WeightedReward(BrightnessReward(), BrightnessReward(), -20.0),
        }
    )
    found = {}
    for mix in ("rewards", "advantages"):
        ctx = replace(toys.context(policy, 4), rubric=rubric)
        found[mix] = kind(group_size=4, combine=mix).collect(ctx, toys.prompts(4))
    each = found["advantages"].rewards

    def advantage(reward: Tensor) -> Tensor:
        return group_advantages(reward, 4) if kind is GRPO else group_mean_advantages(reward, 4, reward)

    expected = advantage(each["color"]) / 21 - 20 * advantage(each["dark"]) / 21
    torch.testing.assert_close(found["advantages"].advantage, expected)
    torch.testing.assert_close(found["rewards"].advantage, advantage(each["color"] - 20 * each["dark"]))
    assert found["rewards"].reward.equal(found["advantages"].reward)


def test_combining_one_reward_changes_nothing() -> None:
    ctx = toys.context(toys.policy("flow"), 4)
    both = [
        GRPO(group_size=4, combine=mix).collect(ctx, toys.prompts(4)).advantage for mix in ("rewards", "advantages")
    ]
    torch.testing.assert_close(*both)


def test_tracker_refuses_combined_advantages() -> None:
    with pytest.raises(ValueError, match="'combine' is advantages"):
        GRPO(advantage="tracker", combine="advantages")


def test_clip_range_high_clips_upper_ratios() -> None:
    ratio, advantage = torch.tensor([[0.5, 0.95, 1.2, 1.5]] * 2), torch.tensor([1.0, -1.0])
    gain, watched = clipped_surrogate(ratio.log(), segment(torch.zeros(2, 4)), advantage, 0.1, clip_range_high=0.3)
    torch.testing.assert_close(gain, torch.tensor([[0.5, 0.95, 1.2, 1.3], [-0.9, -0.95, -1.2, -1.5]]))
    assert watched["clip_fraction"].tolist() == [0.5, 0.5]
