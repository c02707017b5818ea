"""Plain functions as rewards: from a recipe as `type: module:function`, and lambdas from Python."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

import tastemaker as tm
from tastemaker.config.build import build_rubric
from tastemaker.config.dump import config_to_dict
from tastemaker.config.load import load
from tastemaker.config.validate import validate_config
from tastemaker.core.errors import ConfigError, RewardError
from tastemaker.core.types import Placement

QUIET = Console(quiet=True)
SOURCE = """
def redness(images, prompts, **metadata):
    return [float(image[0].mean()) - float(image[1:].mean()) for image in images]

def per_class(images, prompts, label, **metadata):
    return images.mean((1, 2, 3)) + len(prompts[0]) * 0 + label[0]

def frames(images, prompts):
    return images.shape[1] * images.new_ones(len(images))

def one_score(images, prompts):
    return [1.0]

number = 3
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "my_rewards.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "my_rewards", raising=False)
    return "my_rewards"


def scores(settings: dict[str, Any], pixels: torch.Tensor, *metadata: dict[str, Any]) -> list[float]:
    config = load("grpo-toy-flow", ["rewards.color=null"])
    config = validate_config({**config_to_dict(config), "rewards": {"mine": settings}})
    rubric = build_rubric(config.rewards, Placement())  # type: ignore[union-attr]
    return rubric.score(pixels, ["a"] * len(pixels), metadata).total.tolist()


def test_function_named_in_a_recipe_scores_images(module: str) -> None:
    red = torch.zeros(2, 1, 3, 4, 4)
    red[1, :, 0] = 1
    assert scores({"type": f"{module}:redness", "weight": 2.0}, red) == [0.0, 2.0]


def test_function_gets_metadata_as_lists_and_videos_whole(module: str) -> None:
    pixels = torch.full((2, 3, 3, 4, 4), 0.5)
    assert scores({"type": f"{module}:per_class"}, pixels[:, :1], {"label": 2}, {"label": 5}) == [2.5, 2.5]
    assert scores({"type": f"{module}:frames", "modality": "video"}, pixels) == [3.0, 3.0]


def test_function_reward_survives_a_round_trip_through_yaml(module: str) -> None:
    config = load("grpo-toy-flow", [f"rewards.mine={{type: '{module}:redness', batch_size: 3}}"])
    assert validate_config(config_to_dict(config)) == config


def test_function_mistakes_are_named(module: str) -> None:
    with pytest.raises(ConfigError, match=r"rewards\.mine.*nothing_here.*TM109"):
        load("grpo-toy-flow", [f"rewards.mine={{type: '{module}:nothing_here'}}"])
    with pytest.raises(ConfigError, match=r"rewards\.mine.*int.*TM106"):
        load("grpo-toy-flow", [f"rewards.mine={{type: '{module}:number'}}"])
    with pytest.raises(RewardError, match=r"'mine'.*\[1\].*TM116"):
        scores({"type": f"{module}:one_score"}, torch.rand(2, 1, 3, 4, 4))


def test_lambda_from_python_trains_a_model(tmp_path: Path) -> None:
    settings = ["rewards.color=null", "steps=2", "sample.every=0", f"output_dir={tmp_path}", "engine.device=cpu"]
    dark = lambda images, prompts, **metadata: -images.mean((1, 2, 3))
    config = tm.load("grpo-toy-flow", settings)
    metrics = tm.train(config, rewards={"dark": dark})
    assert metrics["rewards/dark"] == pytest.approx(metrics["reward/mean"]) and metrics["reward/mean"] < 0
    run = tm.build(config, rewards={"dark": dark, "bright": lambda images, prompts: images.mean((1, 2, 3))})
    assert list(run.rubric.rewards) == ["dark", "bright"]
    run.engine.close()


def test_function_says_that_it_is_differentiable(tmp_path: Path) -> None:
    def bright(images: torch.Tensor, prompts: list[str], **metadata: object) -> torch.Tensor:
        return images.mean((1, 2, 3))

    settings = ["steps=1", "sample.every=0", "engine.device=cpu", "objective={type: reward_gradient}"]
    config = tm.load("grpo-toy-flow", [*settings, "rewards.color.weight=0", f"output_dir={tmp_path}"])
    with pytest.raises(ConfigError, match="bright"):
        tm.train(config, rewards={"bright": bright}, console=QUIET)
    vars(bright)["differentiable"] = True
    metrics = tm.train(config, rewards={"bright": bright}, console=QUIET)
    assert metrics["grad_norm"] > 0
