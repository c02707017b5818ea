"""Rewards that compare the samples of a prompt: values by hand, permutations, groups, and who may use them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from cli_runner import run_cli
from torch import Tensor

from tastemaker.config.check import find_problems
from tastemaker.config.load import load
from tastemaker.config.validate import build_component
from tastemaker.core.group_selection import mean_ranks, rank_correlation
from tastemaker.core.registry import ConfigError
from tastemaker.core.reward import RewardError, RewardSpec, Rubric, WeightedReward
from tastemaker.core.types import Placement
from tastemaker.rewards.function import register_function
from tastemaker.rewards.group import choose_opponents, content_key

BRIGHTNESS = {"type": "brightness"}
JUDGED: list[tuple[float, float]] = []  # brightness of the pairs that `prefers_first` saw


def prefers_first(first: Tensor, second: Tensor, prompts: list[str], **metadata: Any) -> Tensor:
    """A pairwise reward with a position bias: it overrates the first image by 0.25."""
    a, b = first.mean((1, 2, 3)), second.mean((1, 2, 3))
    JUDGED.extend(zip(a.tolist(), b.tolist(), strict=True))
    return (a - b > -0.25).float()


def above_group_mean(images: Tensor, prompts: list[str], **metadata: Any) -> Tensor:
    brightness = images.mean((1, 2, 3))
    return brightness - brightness.mean()


PAIRWISE = {"type": "function", "function": register_function(prefers_first), "receives": "pair"}
GROUP_FUNCTION = {"type": "function", "function": register_function(above_group_mean), "receives": "group"}
CASES: dict[str, dict[str, Any]] = {
    "win_rate": {"type": "win_rate", "reward": BRIGHTNESS},
    "win rate with margin": {"type": "win_rate", "reward": BRIGHTNESS, "margin": 0.05},
    "win rate of a tournament": {"type": "win_rate", "reward": BRIGHTNESS, "opponents": 2},
    "win rate of an odd tournament": {"type": "win_rate", "reward": BRIGHTNESS, "opponents": 3},
    "win rate of pairs, both orders": {"type": "win_rate", "reward": PAIRWISE},
    "win rate of pairs, coins": {"type": "win_rate", "reward": PAIRWISE, "order": "coin"},
    "win rate of pairs, tournament": {"type": "win_rate", "reward": PAIRWISE, "order": "coin", "opponents": 2},
    "rank": {"type": "rank", "reward": BRIGHTNESS},
    "normal rank": {"type": "rank", "reward": BRIGHTNESS, "scale": "normal"},
    "diversity of pixels": {"type": "group_diversity"},
    "diversity of embeddings": {"type": "group_diversity", "tower": {"type": "clip", "weights": "tiny"}},
    "group function": GROUP_FUNCTION,
    "clipped win rate": {"type": "clipped", "min": 0.2, "reward": {"type": "win_rate", "reward": BRIGHTNESS}},
    "sum with a win rate": {"type": "sum", "rewards": [BRIGHTNESS, {"type": "win_rate", "reward": BRIGHTNESS}]},
    "rank of a win rate": {"type": "rank", "reward": {"type": "win_rate", "reward": BRIGHTNESS, "opponents": 2}},
}


def rubric(settings: dict[str, Any], **changes: Any) -> Rubric:
    spec = build_component(RewardSpec, settings)
    return Rubric({"it": WeightedReward(spec, spec.load(Placement()), **changes)})


def gray(*levels: float, frames: int = 1) -> Tensor:
    """Plain images of these brightnesses."""
    return torch.tensor(levels).view(-1, 1, 1, 1, 1).expand(-1, frames, 3, 4, 4).contiguous()


def score(settings: dict[str, Any], levels: Sequence[float], group_size: int | None = None) -> list[float]:
    size = group_size or len(levels)
    prompts = [f"prompt {i // size}" for i in range(len(levels))]
    scores = rubric(settings).score(gray(*levels), prompts, group_size=size).total
    return [round(x, 4) for x in scores.tolist()]


def test_group_rewards_by_hand() -> None:
    levels = (0.2, 0.9, 0.5, 0.5)
    assert score(CASES["win_rate"], levels) == [0.0, 1.0, 0.5, 0.5]  # wins 0, 3, 1.5, 1.5 of 3
    assert score({**CASES["win_rate"], "margin": 0.45}, levels) == [0.3333, 0.6667, 0.5, 0.5]
    assert score(CASES["rank"], levels) == [0.0, 1.0, 0.5, 0.5]
    # Quantiles of the normal distribution at 1/8, 7/8 and 1/2.
    assert score(CASES["normal rank"], levels) == [-1.1503, 1.1503, 0.0, 0.0]
    # Mean distances to the other three: .7 + .3 + .3, .7 + .4 + .4, .3 + .4 + 0.
    assert score(CASES["diversity of pixels"], levels) == [0.4333, 0.5, 0.2333, 0.2333]
    # Two groups are compared each by itself.
    assert score(CASES["win_rate"], (0.1, 0.2, 0.9, 0.8), group_size=2) == [0.0, 1.0, 1.0, 0.0]
    assert score(CASES["group function"], (0.1, 0.2, 0.9, 0.8), group_size=2) == [-0.05, 0.05, 0.05, -0.05]


def test_judging_both_orders_cancels_a_position_bias() -> None:
    """The judge calls the first image better if it is at most 0.25 darker; in both orders that is a tie."""
    assert score(CASES["win rate of pairs, both orders"], (0.2, 0.3, 0.9)) == [0.25, 0.25, 1.0]
    JUDGED.clear()
    coins = score(CASES["win rate of pairs, coins"], (0.2, 0.3, 0.9))
    assert len(JUDGED) == 3 and sorted(coins) == [0.0, 0.5, 1.0]  # the bias decides between the first two
    generator = torch.Generator().manual_seed(0)
    JUDGED.clear()
    rubric(CASES["win rate of pairs, coins"]).score(
        torch.rand(40, 1, 3, 4, 4, generator=generator), ["it"] * 40, group_size=40
    )
    brighter_first = sum(a > b for a, b in JUDGED) / len(JUDGED)
    assert len(JUDGED) == 780 and 0.42 < brighter_first < 0.58


@pytest.mark.parametrize("name", CASES)
def test_permuting_a_group_permutes_the_scores(name: str) -> None:
    generator = torch.Generator().manual_seed(0)
    pixels, judge = torch.rand(12, 2, 3, 28, 28, generator=generator), rubric(CASES[name])
    pixels = pixels * torch.linspace(0.2, 1, 12)[torch.randperm(12, generator=generator)].view(-1, 1, 1, 1, 1)
    prompts = ["a cat"] * 6 + ["a dog"] * 6
    scores = judge.score(pixels, prompts, group_size=6).total
    assert float(scores.view(2, 6).std(1).min()) > 0
    for _ in range(3):
        order = torch.cat([torch.randperm(6, generator=generator), 6 + torch.randperm(6, generator=generator)])
        torch.testing.assert_close(judge.score(pixels[order], prompts, group_size=6).total, scores[order])
    swapped = torch.cat([pixels[6:], pixels[:6]])  # groups do not see each other
    torch.testing.assert_close(judge.score(swapped, prompts[::-1], group_size=6).total, scores.roll(6))


def test_tournament_gives_every_sample_the_same_number_of_opponents() -> None:
    pixels = torch.rand(8, 1, 3, 4, 4, generator=torch.Generator().manual_seed(0))
    for count in range(1, 7):
        met = choose_opponents(pixels, count)
        assert met.sum(1).tolist() == [count] * 8 and met.equal(met.T) and not met.diagonal().any()
    assert choose_opponents(pixels, 0).sum() == 8 * 7
    orders = {tuple(choose_opponents(x, 2)[0].tolist()) for x in torch.rand(9, 8, 1, 3, 4, 4)}
    assert len(orders) > 1  # another group, other opponents
    with pytest.raises(ValueError, match="TM1585"):
        choose_opponents(pixels[:7], 3)
    assert content_key(pixels[0]) == content_key(pixels[0] + 1e-6) != content_key(pixels[1])


def test_videos_are_compared_by_the_mean_over_frames() -> None:
    bright_then_dark = torch.cat([gray(0.9), gray(0.1)], 1)
    pixels = torch.cat([bright_then_dark, gray(0.6, frames=2)])
    assert rubric(CASES["win_rate"]).score(pixels, ["it"] * 2, group_size=2).total.tolist() == [0.0, 1.0]
    assert rubric(CASES["group function"]).score(pixels, ["it"] * 2, group_size=2).total.tolist() == pytest.approx(
        [-0.05, 0.05]
    )


def test_groups_are_never_cut_by_the_batch_size_of_a_reward() -> None:
    levels = torch.rand(12, generator=torch.Generator().manual_seed(1)).tolist()
    whole = score(CASES["group function"], levels, group_size=4)
    assert score({**GROUP_FUNCTION, "batch_size": 3}, levels, group_size=4) == whole
    assert score({**GROUP_FUNCTION, "batch_size": 9}, levels, group_size=4) == whole


def test_rubric_refuses_batches_that_are_not_groups() -> None:
    judge = rubric(CASES["win_rate"])
    for count, size in ((4, 1), (5, 2)):
        with pytest.raises(ValueError, match="TM1580"):
            judge.score(gray(*[0.5] * count), ["it"] * count, group_size=size)
    with pytest.raises(ValueError, match="TM1581"):
        judge.score(gray(0.1, 0.2, 0.3, 0.4), ["a", "b", "a", "b"], group_size=2)


def test_pointwise_rubric_scores_single_samples_by_the_reward_inside() -> None:
    parts = {
        "wins": build_component(RewardSpec, CASES["win_rate"]),
        "diversity": build_component(RewardSpec, {"type": "group_diversity"}),
        "judged": build_component(RewardSpec, {"type": "win_rate", "reward": PAIRWISE}),
        "both": build_component(RewardSpec, CASES["sum with a win rate"]),
        "plain": build_component(RewardSpec, BRIGHTNESS),
    }
    judge = Rubric({name: WeightedReward(spec, spec.load(Placement()), clip=(0, 0.3)) for name, spec in parts.items()})
    scores = judge.pointwise().score(gray(0.2, 0.9), ["a", "b"])
    assert {name: x.tolist() for name, x in scores.rewards.items()} == {
        "wins": pytest.approx([0.2, 0.9]),
        "both": pytest.approx([0.4, 1.8]),
        "plain": pytest.approx([0.2, 0.9]),
    }
    assert scores.total.tolist() == pytest.approx(
        [0.8, 3.0]
    )  # the clip of win rates does not apply to what they compare


def test_pairwise_rewards_work_only_inside_of_a_win_rate() -> None:
    with pytest.raises(ConfigError, match="TM1586"):
        rubric(PAIRWISE)
    with pytest.raises(RewardError, match="TM1587"):
        rubric({"type": "clipped", "min": 0, "reward": PAIRWISE}).score(gray(0.1), ["it"])
    with pytest.raises(ConfigError, match="TM1584"):
        build_component(RewardSpec, {"type": "rank", "reward": PAIRWISE})
    with pytest.raises(ConfigError, match="TM1582"):
        build_component(RewardSpec, {"type": "cached", "reward": CASES["win_rate"]})


def test_pairwise_answers_outside_0_to_1_are_refused() -> None:
    twice = register_function(lambda first, second, prompts, **metadata: first.mean((1, 2, 3)) * 2)
    judge = rubric({"type": "win_rate", "reward": {"type": "function", "function": twice, "receives": "pair"}})
    with pytest.raises(RewardError, match="TM1583"):
        judge.score(gray(0.9, 0.8), ["it"] * 2, group_size=2)


def test_vlm_pair_sees_both_images_side_by_side() -> None:
    spec = build_component(RewardSpec, {"type": "win_rate", "reward": {"type": "vlm_pair", "weights": "tiny"}})
    pixels = torch.rand(3, 1, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    scores = Rubric({"wins": WeightedReward(spec, spec.load(Placement()))}).score(pixels, ["a dog"] * 3, group_size=3)
    assert float(scores.total.mean()) == pytest.approx(0.5) and float(scores.total.std()) > 0
    with pytest.raises(ConfigError, match="TM1588"):
        build_component(RewardSpec, {"type": "vlm_pair", "question": "which one?"})


def test_rank_correlation_by_hand() -> None:
    first = torch.tensor([[1.0, 2.0, 3.0, 4.0]]).repeat(4, 1)
    second = torch.tensor([[10.0, 20.0, 30.0, 31.0], [4, 3, 2, 1], [2, 1, 4, 3], [5, 5, 5, 5]])
    assert rank_correlation(first, second).tolist() == pytest.approx([1.0, -1.0, 0.6, 0.0])
    assert mean_ranks(torch.tensor([[5.0, 1.0, 5.0, 5.0]])).tolist() == [[2.0, 0.0, 2.0, 2.0]]


@pytest.mark.parametrize(
    ("recipe", "settings", "code"),
    [
        ("ddpo-toy-causal", {"type": "win_rate", "reward": BRIGHTNESS}, "TM1592"),
        ("draft-toy-flow", {"type": "group_diversity", "weight": 0}, "TM1592"),
        ("dpo-toy-flow", {"type": "rank", "reward": BRIGHTNESS}, "TM1592"),
        ("grpo-toy-flow", {"type": "vlm_pair"}, "TM1593"),
    ],
)
def test_objectives_without_groups_are_told_what_to_use(recipe: str, settings: dict[str, Any], code: str) -> None:
    text = str(settings).replace("'", "")
    assert any(code in problem for problem in find_problems(load(recipe, [f"rewards.it={text}"])))


def test_score_command_refuses_group_rewards(tmp_path: Any, capsys: pytest.CaptureFixture[str]) -> None:
    for reward in ("group_diversity", "{type: win_rate, reward: {type: jpeg}}", "vlm_pair"):
        assert run_cli("score", str(tmp_path), "--reward", reward) != 0
        assert "TM1589" in capsys.readouterr().err
