"""`device: http://...`: a reward of the recipe that servers compute."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from reward_server import serve_on_free_port

from tastemaker.config.build import build_rubric, make_tiny
from tastemaker.config.check import find_problems
from tastemaker.config.dump import config_to_yaml
from tastemaker.config.load import load
from tastemaker.config.required_files import find_missing_files, published_sources
from tastemaker.config.schema import RewardConfig
from tastemaker.config.validate import validate_config
from tastemaker.config.yaml_io import parse_yaml
from tastemaker.core.registry import ConfigError
from tastemaker.core.reward import Rubric
from tastemaker.core.types import Placement
from tastemaker.rewards.color import BrightnessReward
from tastemaker.rewards.motion import StillnessReward

URL = "http://127.0.0.1:1"
CLIPS = torch.rand(5, 3, 3, 8, 8, generator=torch.Generator().manual_seed(0))


def rubric_of(**rewards: RewardConfig) -> Rubric:
    return build_rubric(rewards, Placement())


def test_servers_compute_the_scores_that_the_reward_has_here() -> None:
    for spec, other in ((BrightnessReward(0.3), BrightnessReward(0.4)), (StillnessReward(), BrightnessReward())):
        with serve_on_free_port(spec) as url, serve_on_free_port(other) as wrong:
            here = rubric_of(it=RewardConfig(spec)).score(CLIPS, ["x"] * 5).total
            for device in (url, (url, url)):
                rubric = rubric_of(it=RewardConfig(spec, device=device))
                assert rubric.uses_threads and rubric.score(CLIPS, ["x"] * 5).total.equal(here)
            code = "TM2055" if isinstance(other, type(spec)) else "TM2056"
            for device in (wrong, (url, wrong)):
                with pytest.raises(ConfigError, match=rf"rewards\.it\.device.*{code}"):
                    rubric_of(it=RewardConfig(spec, device=device))


def test_differences_of_settings_are_named_and_batch_sizes_may_differ() -> None:
    with serve_on_free_port(BrightnessReward(0.3, batch_size=2)) as url:
        rubric = rubric_of(it=RewardConfig(BrightnessReward(0.3, batch_size=4), device=url))
        expected = rubric_of(it=RewardConfig(BrightnessReward(0.3))).score(CLIPS, ["x"] * 5).total
        assert rubric.score(CLIPS, ["x"] * 5).total.equal(expected)
        with pytest.raises(ConfigError, match=r"target is 0\.3 there and 0\.7 here"):
            rubric_of(it=RewardConfig(BrightnessReward(0.7), device=url))


def test_token_is_that_of_the_environment_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("REWARD_TOKEN", raising=False)
    with serve_on_free_port(BrightnessReward(), token="secret-word") as url:
        with pytest.raises(Exception, match="401"):
            rubric_of(it=RewardConfig(BrightnessReward(), device=url))
        monkeypatch.setenv("REWARD_TOKEN", "secret-word")
        rubric = rubric_of(it=RewardConfig(BrightnessReward(), device=url))
        assert rubric.score(CLIPS, ["x"] * 5).total.shape == (5,)
        assert "secret-word" not in repr(vars(rubric))


def test_recipe_with_a_server_round_trips_and_needs_no_weights(tmp_path: Path) -> None:
    weights = tmp_path / "missing.pt"
    reward = f"rewards.hps={{type: hps, weights: {weights}}}"
    assert find_missing_files(load("grpo-toy-flow", [reward]))
    config = load("grpo-toy-flow", [reward, f"rewards.hps.device=[{URL}, {URL}]"])
    assert not find_missing_files(config) and published_sources(config) == ()
    assert config.rewards["hps"].servers == (URL, URL)
    assert validate_config(parse_yaml(config_to_yaml(config), "")) == config
    tiny = make_tiny(config).rewards["hps"]
    assert tiny.device is None and tiny.spec == config.rewards["hps"].spec.tiny()
    assert make_tiny(load("grpo-toy-flow", ["rewards.color.device=cpu"])).rewards["color"].device == "cpu"


@pytest.mark.parametrize(
    ("recipe", "settings", "code"),
    [
        ("reward-gradient-toy-video", ["rewards.{name}.device=" + URL], "TM2057"),
        (
            "grpo-toy-flow",
            ["rewards.color={type: win_rate, reward: {type: vlm_pair}, device: '" + URL + "'}"],
            "TM2058",
        ),
        ("grpo-toy-flow", ["rewards.color={type: remote, device: '" + URL + "'}"], "TM2058"),
        ("grpo-toy-flow", ["rewards.color.device=http://:1"], "TM402"),
    ],
)
def test_rewards_that_a_server_cannot_score_are_refused(recipe: str, settings: list[str], code: str) -> None:
    name = next(iter(load(recipe).rewards))
    config = load(recipe, [setting.replace("{name}", name) for setting in settings])
    assert any(code in problem and f"rewards.{name}.device" in problem for problem in find_problems(config, 1))


@pytest.mark.parametrize("device", ["ftp://a", "[]", "[cpu]", "['http://a', cuda]"])
def test_devices_that_are_no_addresses_are_refused(device: str) -> None:
    with pytest.raises(ConfigError, match=r"rewards\.color\.device: expected cpu.*TM2059\]$"):
        load("grpo-toy-flow", [f"rewards.color.device={device}"])


def test_logged_reward_of_a_gradient_run_may_have_a_server() -> None:
    settings = [f"rewards.watched={{type: brightness, weight: 0, device: '{URL}'}}"]
    assert find_problems(load("reward-gradient-toy-video", settings), 1) == []
