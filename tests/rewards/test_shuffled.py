"""The control: what can be learned of a shuffled reward is nothing."""

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


def scores(spec: RewardSpec, pixels: Tensor, prompts: Prompts) -> Tensor:
    return Rubric({"it": WeightedReward(spec, spec.load(Placement()))}).score(pixels, prompts).total


def test_everybody_gets_what_another_one_earned() -> None:
    true, paid = (scores(spec, PIXELS, COLORS) for spec in (ColorReward(), ShuffledReward(ColorReward())))
    assert not torch.isclose(true, paid).any()
    torch.testing.assert_close(true.sort().values, paid.sort().values)


def test_the_order_is_the_same_for_the_same_pictures_and_another_for_others() -> None:
    assert derangement(PIXELS) == derangement(PIXELS.clone())
    assert derangement(PIXELS) != derangement(PIXELS * 0.9)


def test_everybody_is_in_one_circle() -> None:
    others, place, seen = derangement(PIXELS), 0, set()
    while place not in seen:
        seen.add(place)
        place = others[place]
    assert len(seen) == 40


def test_where_gradients_flow_pictures_are_held_against_other_prompts() -> None:
    pixels = PIXELS.clone().requires_grad_()
    paid = scores(ShuffledReward(ColorReward()), pixels, COLORS)
    others = derangement(PIXELS)
    torch.testing.assert_close(paid.detach(), scores(ColorReward(), PIXELS, [COLORS[i] for i in others]))
    assert torch.autograd.grad(paid.sum(), pixels)[0].abs().sum() > 0


def test_frames_of_a_clip_stay_together() -> None:
    true, paid = (scores(spec, CLIPS, [""] * 12) for spec in (BrightnessReward(), ShuffledReward(BrightnessReward())))
    torch.testing.assert_close(true.sort().values, paid.sort().values)
    assert not torch.isclose(true, paid).any()


@dataclass(frozen=True)
class Short(RewardSpec, Reward):
    """A reward that bears three rows, which it counts."""

    batch_size: int = 3
    card: ClassVar[RewardCard] = RewardCard(range="any", failure_modes="anything")
    differentiable: ClassVar[bool] = False
    modality: ClassVar[Literal["image"]] = "image"
    runs_on: ClassVar[Literal["device"]] = "device"

    def load(self, placement: Placement) -> Short:
        return self

    def tiny(self) -> Short:
        return self

    def score(self, pixels: Tensor, prompts: Prompts, metadata: Sequence[Metadata]) -> Tensor:
        assert len(pixels) <= 3
        return pixels.mean((1, 2, 3, 4))


def test_the_inner_reward_is_asked_about_no_more_than_it_can_bear() -> None:
    torch.testing.assert_close(
        scores(ShuffledReward(Short()), PIXELS, COLORS).sort().values, scores(Short(), PIXELS, COLORS).sort().values
    )


def test_one_picture_alone_cannot_be_exchanged() -> None:
    with pytest.raises(RewardError, match="at least two"):
        scores(ShuffledReward(ColorReward()), PIXELS[:1], ["red"])


def test_a_recipe_can_ask_for_it_and_says_so_when_resolved() -> None:
    config = load("grpo-toy-flow", ["rewards.color={type: shuffled, reward: {type: color}}"])
    assert config_to_dict(config)["rewards"]["color"]["type"] == "shuffled"
    assert validate_config(config_to_dict(config)) == config
