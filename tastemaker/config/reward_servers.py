"""Rewards whose `device` is a reward server: which ones are possible, and what scores them."""

from __future__ import annotations

import json

from ..core.reward import RewardSpec
from ..rewards.remote import RemoteReward, RewardOnServer
from .dump import registered_name, to_plain
from .schema import RewardConfig, RunConfig


def place_on_servers(name: str, reward: RewardConfig) -> RewardSpec:
    """The reward itself, or one that asks the servers that its `device` names."""
    if not reward.servers:
        return reward.spec
    settings = json.dumps(to_plain(reward.spec, None))
    return RewardOnServer(f"rewards.{name:.60}.device", reward.spec, reward.servers, settings)


def check_reward_servers(config: RunConfig, world_size: int) -> str | None:
    """Servers score single samples, and return no gradient."""
    for name, reward in config.rewards.items():
        key, spec = f"rewards.{name:.60}.device", reward.spec
        if not reward.servers:
            continue
        if reward.weight and spec.differentiable and config.objective.needs_gradient:
            return (
                f"{key}: the objective '{registered_name(type(config.objective))}' needs the gradient of this reward, "
                f"which a server cannot return; remove {key}, or set the weight to 0 [TM2057]"
            )
        if spec.needs_group or isinstance(spec, RemoteReward):
            found = "compares the samples of a prompt" if spec.needs_group else "names its servers in 'url'"
            return f"{key}: this reward {found}, so 'device' cannot be a server; remove {key} [TM2058]"
        try:
            RemoteReward(reward.servers)
        except ValueError as error:
            return f"{key}: {error}"
    return None
