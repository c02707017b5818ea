"""Held-out rewards are scored by the guard and on samples, never in training steps."""

from __future__ import annotations

from pathlib import Path

import pytest

from tastemaker.config.build import build
from tastemaker.config.load import load
from tastemaker.core.registry import ConfigError
from tastemaker.training.events import GuardChecked, SamplesGenerated, StepCompleted
from tastemaker.training.loop import train

SHORT = [
    "steps=2",
    "batch.prompts=4",
    "sample.every=2",
    "guard.every=2",
    "guard.prompts=4",
    "guard.samples_per_prompt=2",
]


def test_held_out_rewards_are_not_scored_at_training_steps(tmp_path: Path) -> None:
    weights = []
    for held_out in ("true", "false"):
        reward = f"rewards.dark={{type: brightness, weight: 0, held_out: {held_out}}}"
        run = build(load("grpo-toy-flow", [*SHORT, reward]), tmp_path / held_out)
        names = {StepCompleted: "rewards/dark", GuardChecked: "rewards/dark", SamplesGenerated: "dark"}
        is_scored = {event_type: set[bool]() for event_type in names}
        for event in train(run):
            if isinstance(event, StepCompleted | GuardChecked):
                is_scored[type(event)].add(names[type(event)] in event.metrics)
            elif isinstance(event, SamplesGenerated):
                is_scored[SamplesGenerated].add("dark" in event.scores)
        assert is_scored == {StepCompleted: {held_out == "false"}, GuardChecked: {True}, SamplesGenerated: {True}}
        weights.append({key: p.detach().clone() for key, p in run.policy.weights.trainable().items()})
    assert all(weights[0][key].equal(weights[1][key]) for key in weights[0])


def test_held_out_reward_must_have_weight_zero() -> None:
    with pytest.raises(ConfigError, match=r"rewards\.dark.*held_out.*TM048"):
        load("grpo-toy-flow", ["rewards.dark={type: brightness, weight: 0.5, held_out: true}"])
