"""Weights, normalization and clipping of rewards in configurations."""

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
    rewards = config_to_dict(config)["rewards"]
    assert rewards["bright"]["normalize"] == {"mean": 0.5, "std": 0.25} and rewards["bright"]["clip"] == [-1.0, 1.0]
    assert "normalize" not in rewards["color"] and "clip" not in rewards["color"]


def test_total_is_normalized_and_parts_are_raw() -> None:
    rewards = {name: load("grpo-toy-flow", [BRIGHT]).rewards[name] for name in ("bright",)}
    pixels = torch.tensor([0.0, 0.375, 0.5, 1.0])[:, None, None, None, None].expand(4, 1, 3, 2, 2)
    pixels = pixels.clone().requires_grad_()
    scores = build_rubric(rewards, Placement()).score(pixels, ["", "", "", ""])
    assert scores.rewards["bright"].tolist() == pytest.approx([0.0, 0.375, 0.5, 1.0])
    assert scores.total.tolist() == pytest.approx([2 * -1.0, 2 * -0.5, 0.0, 2 * 1.0])
    gradient = torch.autograd.grad(scores.total.sum(), pixels)[0].sum((1, 2, 3, 4))
    assert gradient.tolist() == pytest.approx([0, 8, 8, 0])


@pytest.mark.parametrize(
    ("settings", "key", "fragments"),
    [
        ("clip: [1, 0]", "rewards.b", ["'clip'", "[1.0, 0.0]"]),
        ("clip: [1]", "rewards.b.clip", ["more than 1 item"]),
        ("clip: 3", "rewards.b.clip", ["a list", "got 3"]),
        ("normalize: {std: 0}", "rewards.b.normalize.std", ["more than 0", "got 0"]),
        ("normalize: {meen: 0}", "rewards.b.normalize", ["'meen'", "'mean'?"]),
        ("normalise: {mean: 0}", "rewards.b", ["'normalise'", "'normalize'?"]),
    ],
)
def test_invalid_reward_settings_are_reported(settings: str, key: str, fragments: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        validate_config(apply_overrides(read_recipe("grpo-toy-flow"), [f"rewards.b={{type: brightness, {settings}}}"]))
    (message,) = str(error.value).splitlines()
    assert message.startswith(f"{key}: ") and all(fragment in message for fragment in fragments), message


def type_names(definitions: dict[str, Any], kind: str) -> set[str]:
    """Every name that the schema allows for `type:`."""
    types = [choice["properties"]["type"] for choice in definitions[kind]["anyOf"]]
    return {name for node in types for name in [*node.get("enum", []), *([node["const"]] if "const" in node else [])]}


def test_schema_has_aliases_and_reward_settings() -> None:
    definitions = json.loads(json.dumps(build_schema()))["$defs"]
    assert {"pickscore", "pick_score", "aesthetic_hps"} <= type_names(definitions, "reward")
    properties = definitions["weighted reward"]["anyOf"][0]["properties"]
    assert {"weight", "normalize", "clip"} <= set(properties)
    assert "clip" not in definitions["reward"]["anyOf"][0]["properties"]
