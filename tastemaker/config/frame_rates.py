"""Frames per second of generated clips, for rewards that depend on it."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

from ..core.model_spec import ModelSpec
from ..rewards.video_align import VideoAlignReward
from .dump import registered_name
from .schema import RunConfig
from .shared_tokenizers import change_rewards

# As published, of models without a setting `fps`; Wan 2.2 TI2V-5B has another rate than the other Wans.
FRAME_RATES = {
    "cogvideox": 8.0,
    "hunyuanvideo": 24.0,
    "hunyuanvideo15": 24.0,
    "mochi": 30.0,
    "wan": 16.0,
    "wan_i2v": 16.0,
}
WAN_TI2V, WAN_TI2V_RATE = "TI2V", 24.0


def find_frame_rate(model: ModelSpec) -> float | None:
    """The setting `fps` of a model, or else the published rate of its type; None if that is unknown."""
    settings: Any = model  # every spec is a dataclass
    if any(field.name == "fps" for field in fields(settings)):
        return float(settings.fps)
    kind = registered_name(type(model))
    if kind.startswith("wan") and WAN_TI2V in str(settings.weights):
        return WAN_TI2V_RATE
    return FRAME_RATES.get(kind)


def share_frame_rate(config: RunConfig) -> RunConfig:
    """The configuration with the model's frame rate as that of `video_align` rewards which name none."""
    rate = find_frame_rate(config.model)
    if rate is None:
        return config

    def choose(reward: Any) -> dict[str, Any]:
        return {"fps": rate} if isinstance(reward, VideoAlignReward) and reward.fps is None else {}

    rewards = {name: replace(each, spec=change_rewards(each.spec, choose)) for name, each in config.rewards.items()}
    return replace(config, rewards=rewards)
