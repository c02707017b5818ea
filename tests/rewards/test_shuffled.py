"""The shuffled reward: a control in which every sample gets the score of another one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import pytest
import torch
from torch import Tensor

from tastemaker.config.dump import config_to_dict
from tastemaker.config.load import load
from tastemaker.config.validate import validate_config
from tastemaker.core.reward import Reward, RewardCard, RewardError, RewardSpec, Rubric, WeightedReward
from tastemaker.core.types import Metadata, Placement, Prompts
from tastemaker.rewards.color import BrightnessReward, ColorReward
from tastemaker.rewards.wrappers import ShuffledReward, derangement

PIXELS = torch.rand(40, 1, 3, 6, 6, generator=torch.Generator().manual_seed(0))
CLIPS = torch.rand(12, 5, 3, 6, 6, generator=torch.Generator().manual_seed(1))
COLORS = [("red", "green", "blue", "yellow")[i % 4] for i in range(40)]


def compute_scores(spec: RewardSpec, pixels: Tensor, prompts: Prompts) -> Tensor:
    return Rubric({"it": WeightedReward(spec, spec.load(Placement()))}).score(pixels, prompts).total


def test_every_sample_gets_the_score_of_another() -> None:
    original, shuffled = (
        compute_scores(spec, PIXELS, COLORS) for spec in (ColorReward(), ShuffledReward(ColorReward()))
    )
    assert not torch.isclose(original, shuffled).any()
    torch.testing.assert_close(original.sort().values, shuffled.sort().values)


def test_derangement_depends_only_on_the_pixels() -> None:
    assert derangement(PIXELS) == derangement(PIXELS.clone())
    assert derangement(PIXELS) != derangement(PIXELS * 0.9)


def test_derangement_is_a_single_cycle() -> None:
    order, index, visited = derangement(PIXELS), 0, set()
    while index not in visited:
        visited.add(index)
        index = order[index]
    assert len(visited) == 40


def test_differentiable_scores_use_shuffled_prompts() -> None:
    pixels = PIXELS.clone().requires_grad_()
    shuffled = compute_scores(ShuffledReward(ColorReward()), pixels, COLORS)
    order = derangement(PIXELS)
    torch.testing.assert_close(shuffled.detach(), compute_scores(ColorReward(), PIXELS, [COLORS[i] for i in order]))
    assert torch.autograd.grad(shuffled.sum(), pixels)[0].abs().sum() > 0


def test_frames_of_a_clip_are_shuffled_together() -> None:
    original, shuffled = (
        compute_scores(spec, CLIPS, [""] * 12) for spec in (BrightnessReward(), ShuffledReward(BrightnessReward()))
    )
    torch.testing.assert_close(original.sort().values, shuffled.sort().values)
    assert not torch.isclose(original, shuffled).any()


@dataclass(frozen=True)
class SmallBatchReward(RewardSpec, Reward):
    """A reward that asserts its batch size of three."""

    batch_size: int = 3
    card: ClassVar[RewardCard] = RewardCard(range="any", failure_modes="anything")
    differentiable: ClassVar[bool] = False
    modality: ClassVar[Literal["image"]] = "image"
    runs_on: ClassVar[Literal["device"]] = "device"

    def load(self, placement: Placement) -> SmallBatchReward:
        return self

    def tiny(self) -> SmallBatchReward:
        return self

    def score(self, pixels: Tensor, prompts: Prompts, metadata: Sequence[Metadata]) -> Tensor:
        assert len(pixels) <= 3
        return pixels.mean((1, 2, 3, 4))


def test_batch_size_of_the_inner_reward_is_respected() -> None:
    torch.testing.assert_close(
        compute_scores(ShuffledReward(SmallBatchReward()), PIXELS, COLORS).sort().values,
        compute_scores(SmallBatchReward(), PIXELS, COLORS).sort().values,
    )


def test_single_sample_is_refused() -> None:
    with pytest.raises(RewardError, match=r"two.*TM415"):
        compute_scores(ShuffledReward(ColorReward()), PIXELS[:1], ["red"])


def test_config_with_shuffled_reward_round_trips() -> None:
    config = load("grpo-toy-flow", ["rewards.color={type: shuffled, reward: {type: color}}"])
    assert config_to_dict(config)["rewards"]["color"]["type"] == "shuffled"
    assert validate_config(config_to_dict(config)) == config
