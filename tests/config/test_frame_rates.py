"""The frame rate of a model reaches `video_align`, also inside other rewards."""

from __future__ import annotations

import pytest

from tastemaker.config.frame_rates import share_frame_rate
from tastemaker.config.load import load
from tastemaker.verification.models import list_models, load_spec

REWARDS = [
    "rewards.a={type: video_align}",
    "rewards.b={type: video_align, fps: 5}",
    "rewards.c={type: sum, rewards: [{type: clipped, reward: {type: video_align}, min: 0}]}",
]


@pytest.mark.parametrize(
    ("model", "rate"),
    [
        ("{type: ltx}", 25.0),
        ("{type: ltx, fps: 30.0}", 30.0),
        ("{type: cogvideox}", 8.0),
        ("{type: wan}", 16.0),
        ("{type: wan_i2v, weights: Wan-AI/Wan2.2-TI2V-5B-Diffusers}", 24.0),
        ("{type: toy_flow}", None),
    ],
)
def test_rewards_get_the_rate_of_the_model(model: str, rate: float | None) -> None:
    rewards = share_frame_rate(load("grpo-toy-flow", [*REWARDS, f"model={model}"])).rewards
    assert rewards["a"].spec.fps == rate and rewards["b"].spec.fps == 5
    assert rewards["c"].spec.rewards[0].reward.fps == rate


def test_rates_of_video_models_are_the_published_ones() -> None:
    """A new video model without a rate fails here: `video_align` would read its clips at 16 frames per second."""
    videos = {name: spec for name in list_models() if (spec := load_spec(name)).frames > 1}
    assert {name: spec.frame_rate for name, spec in videos.items()} == {
        **dict.fromkeys(("modelscope", "playground-video", "toy-video"), None),
        **dict.fromkeys(("hunyuanvideo", "hunyuanvideo15", "ltx2", "opensora", "wan22-ti2v"), 24.0),
        **dict.fromkeys(("wan", "wan-i2v", "wan22", "wan22-i2v"), 16.0),
        "cogvideox": 8.0,
        "ltx": 25.0,
        "mochi": 30.0,
        "svd": 7.0,
        "videocrafter2": 28.0,
    }
