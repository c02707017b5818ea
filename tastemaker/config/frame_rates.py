"""The model's frame rate for rewards that depend on it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ..rewards.video_align import VideoAlignReward
from .schema import RunConfig
from .shared_tokenizers import change_rewards


def share_frame_rate(config: RunConfig) -> RunConfig:
    """The configuration with the model's frame rate as that of `video_align` rewards which name none."""
    rate = config.model.frame_rate
    if rate is None:
        return config

    def choose(reward: Any) -> dict[str, Any]:
        return {"fps": rate} if isinstance(reward, VideoAlignReward) and reward.fps is None else {}

    rewards = {name: replace(each, spec=change_rewards(each.spec, choose)) for name, each in config.rewards.items()}
    return replace(config, rewards=rewards)
