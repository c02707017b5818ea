"""How rewards count, as recipes say it."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from tastemaker.config.build import build_rubric
from tastemaker.config.dump import config_to_dict, config_to_yaml
from tastemaker.config.json_schema import build_schema
from tastemaker.config.load import apply_overrides, load, read_recipe
from tastemaker.config.schema import RewardConfig
from tastemaker.config.validate import validate_config
from tastemaker.config.yaml_io import parse_yaml
from tastemaker.core.registry import ConfigError
from tastemaker.core.reward import RewardNormalization
from tastemaker.core.types import Placement
from tastemaker.rewards.color import BrightnessReward

BRIGHT = "rewards.bright={type: brightness, weight: 2, normalize: {mean: 0.5, std: 0.25}, clip: [-1, 1]}"


def test_reward_normalization_and_clipping_are_read() -> None:
    config = load("grpo-toy-flow", [BRIGHT])
    assert config.rewards["bright"] == RewardConfig(
        BrightnessReward(), 2.0, RewardNormalization(0.5, 0.25), (-1.0, 1.0)
    )
    assert config.rewards["color"] == RewardConfig(config.rewards["color"].spec)


def test_reward_settings_round_trip() -> None:
    config = load("grpo-toy-flow", [BRIGHT])
    assert validate_config(parse_yaml(config_to_yaml(config), "")) == config
    said = config_to_dict(config)["rewards"]
    assert said["bright"]["normalize"] == {"mean": 0.5, "std": 0.25} and said["bright"]["clip"] == [-1.0, 1.0]
    assert "normalize" not in said["color"] and "clip" not in said["color"]


def test_total_is_normalized_and_parts_are_raw() -> None:
    rewards = {name: load("grpo-toy-flow", [BRIGHT]).rewards[name] for name in ("bright",)}
    pixels = torch.tensor([0.0, 0.375, 0.5, 1.0])[:, None, None, None, None].expand(4, 1, 3, 2, 2)
    pixels = pixels.clone().requires_grad_()
    scores = build_rubric(rewards, Placement()).score(pixels, ["", "", "", ""])
    assert scores.rewards["bright"].tolist() == pytest.approx([0.0, 0.375, 0.5, 1.0])
    assert scores.total.tolist() == pytest.approx([2 * -1.0, 2 * -0.5, 0.0, 2 * 1.0])
    slope = torch.autograd.grad(scores.total.sum(), pixels)[0].sum((1, 2, 3, 4))
    assert slope.tolist() == pytest.approx([0, 8, 8, 0])


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ("clip: [1, 0]", "rewards.b: 'clip' is [1.0, 0.0]; expected a lower and a higher bound"),
        ("clip: [1]", "rewards.b.clip: expected more than 1 item"),
        ("clip: 3", "rewards.b.clip: expected a list, got 3"),
        ("normalize: {std: 0}", "rewards.b.normalize.std: expected more than 0, got 0"),
        ("normalize: {meen: 0}", "rewards.b.normalize: unknown key 'meen'; did you mean 'mean'?"),
        ("normalise: {mean: 0}", "rewards.b: unknown key 'normalise'; did you mean 'normalize'?"),
    ],
)
def test_invalid_reward_settings_are_reported(settings: str, sentence: str) -> None:
    with pytest.raises(ConfigError) as told:
        validate_config(apply_overrides(read_recipe("grpo-toy-flow"), [f"rewards.b={{type: brightness, {settings}}}"]))
    assert str(told.value) == sentence


def named(kinds: dict[str, Any], kind: str) -> set[str]:
    """Every name a `type:` may have, as editors know it."""
    types = [choice["properties"]["type"] for choice in kinds[kind]["anyOf"]]
    return {name for told in types for name in [*told.get("enum", []), *([told["const"]] if "const" in told else [])]}


def test_schema_has_aliases_and_reward_settings() -> None:
    kinds = json.loads(json.dumps(build_schema()))["$defs"]
    assert {"pickscore", "pick_score", "aesthetic_hps"} <= named(kinds, "reward")
    beside = kinds["weighted reward"]["anyOf"][0]["properties"]
    assert {"weight", "normalize", "clip"} <= set(beside)
    assert "clip" not in kinds["reward"]["anyOf"][0]["properties"]
