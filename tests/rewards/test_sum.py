"""The sum of rewards, and aliases of reward names."""

from __future__ import annotations

from dataclasses import fields

import pytest
import torch

from tastemaker.config.registries import REWARDS
from tastemaker.config.schema import RewardConfig
from tastemaker.config.validate import build_component
from tastemaker.core.registry import Registry
from tastemaker.core.reward import RewardSpec, Rubric, WeightedReward, load_shared_reward
from tastemaker.core.types import Placement
from tastemaker.rewards.clip_heads import AestheticReward, WeatherReward
from tastemaker.rewards.color import BrightnessReward, ColorReward
from tastemaker.rewards.compression import JpegReward
from tastemaker.rewards.detection import DetectionReward
from tastemaker.rewards.hps import HpsReward
from tastemaker.rewards.motion import StillnessReward
from tastemaker.rewards.pickscore import PickScoreReward
from tastemaker.rewards.wrappers import SumReward

PIXELS = torch.rand(4, 3, 3, 6, 6, generator=torch.Generator().manual_seed(0))
PROMPTS = ("red", "green", "blue", "grey")


def total(spec: RewardSpec, pixels: torch.Tensor = PIXELS) -> torch.Tensor:
    return Rubric({"it": WeightedReward(spec, load_shared_reward(spec, Placement()))}).score(pixels, PROMPTS).total


def test_sum_equals_the_weighted_rubric_total() -> None:
    scores = total(SumReward((BrightnessReward(), ColorReward(), StillnessReward()), (0.5, -2.0, 3.0)))
    torch.testing.assert_close(
        scores, 0.5 * total(BrightnessReward()) - 2 * total(ColorReward()) + 3 * total(StillnessReward())
    )
    torch.testing.assert_close(
        total(SumReward((BrightnessReward(), JpegReward()))), total(BrightnessReward()) + total(JpegReward())
    )


def test_sum_is_differentiable_if_all_weighted_rewards_are() -> None:
    pixels = PIXELS.clone().requires_grad_()
    spec = SumReward((BrightnessReward(), ColorReward()), (2.0, 0.0))
    (gradient,) = torch.autograd.grad(total(spec, pixels).sum(), pixels)
    torch.testing.assert_close(gradient, torch.full_like(PIXELS, 2 / PIXELS[0].numel()))
    assert not SumReward((BrightnessReward(), JpegReward())).differentiable
    assert SumReward((BrightnessReward(), JpegReward()), (1.0, 0.0)).differentiable


def test_sum_takes_traits_of_inner_rewards() -> None:
    mixed = SumReward((JpegReward(batch_size=3), StillnessReward(batch_size=7)))
    assert (mixed.modality, mixed.runs_on, mixed.batch_size) == ("video", "device", 7)
    assert SumReward((JpegReward(),)).runs_on == "host"
    assert "plain white" in SumReward((BrightnessReward(), ColorReward())).card.failure_modes


@pytest.mark.parametrize("weights", [(1.0,), (1.0, 2.0, 3.0)])
def test_wrong_number_of_weights_is_refused(weights: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match=r"2 rewards and \d weights.*TM416"):
        SumReward((BrightnessReward(), ColorReward()), weights)


def test_upstream_reward_names_are_accepted() -> None:
    assert build_component(RewardSpec, {"type": "pick_score", "batch_size": 3}) == PickScoreReward(batch_size=3)
    assert isinstance(build_component(RewardSpec, {"type": "objectDetection"}), DetectionReward)
    assert [build_component(RewardSpec, {"type": name}) for name in ("rainy", "snowy")] == [
        WeatherReward("rainy"),
        WeatherReward("snowy"),
    ]
    both = build_component(RewardSpec, {"type": "aesthetic_hps"})
    assert both == SumReward(
        (AestheticReward(), HpsReward(resize_mode="stretch")), (0.5, 7.5)
    )  # (aesthetic + 15 hps) / 2
    assert build_component(RewardSpec, {"type": "aesthetic_hps", "weights": [1, 2]}).weights == (1.0, 2.0)


def test_alias_resolves_to_its_registered_name_and_is_not_listed() -> None:
    registry = Registry("color", {"red": "colorsys:rgb_to_hsv", "hue": "fractions:Fraction"})
    registry.add_alias("rouge", {"type": "hue"})
    assert list(registry) == ["hue", "red"] and registry.aliases("hue") == ["rouge"] and registry.aliases("red") == []
    assert registry.find("rouge") is registry.find("hue")
    assert registry.name(registry.find("rouge")) == "hue"
    assert registry.resolve_alias({"type": "rouge", "a": 1}) == {"type": "hue", "a": 1}


def test_reward_settings_do_not_clash_with_reward_config_keys() -> None:
    reserved = {f.name for f in fields(RewardConfig)} - {"spec"}
    for name in REWARDS:
        cls = REWARDS.find(name)
        assert not reserved & {f.name for f in fields(cls)}, name  # type: ignore[arg-type]  # every spec is a dataclass
