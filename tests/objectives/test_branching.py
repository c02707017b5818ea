"""Branching trajectories of TempFlow-GRPO: what samples share, and what they are compared with."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import toys

from tastemaker.config.check import require_valid
from tastemaker.config.load import load
from tastemaker.core.policy import Policy
from tastemaker.core.registry import ConfigError
from tastemaker.objectives.grpo import GRPO
from tastemaker.processes.dynamics import FlowSDE
from tastemaker.processes.gaussian import GaussianProcess, SDEWindow
from tastemaker.processes.paths import RectifiedFlow

BRANCHING = GaussianProcess(RectifiedFlow(), FlowSDE(0.7), 8, SDEWindow(1))
TEMPFLOW = GRPO(group_size=12, branches=6, clip_range=1e-3, time_weighting="noise")


def flow_policy(process: GaussianProcess) -> Policy[Any]:
    return replace(toys.pretrained_policy("flow"), process=process)


def test_samples_of_a_start_part_at_the_one_random_step_and_are_compared_with_each_other() -> None:
    window = SDEWindow(1, start_min=3, schedule="fixed")
    ctx = toys.context(flow_policy(replace(BRANCHING, window=window)), 4)
    experience = TEMPFLOW.collect(ctx, toys.prompts(4))
    (segment,) = experience.trajectory.segments
    states, actions = (x.unflatten(0, (8, 6)) for x in (segment.state, segment.action))  # 4 prompts of 2 starts
    assert states.eq(states[:, :1]).all() and not states[::2].eq(states[1::2]).any()
    assert (actions[:, 1:] - actions[:, :1]).abs().amin() > 0
    reward = experience.reward.view(8, 6)
    expected = (reward - reward.mean(1, keepdim=True)) / (reward.std(1, keepdim=True, correction=0) + 1e-4)
    torch.testing.assert_close(experience.advantage.view(8, 6), expected)


def test_without_branches_each_sample_has_its_own_start_and_chunks_change_no_start() -> None:
    ctx = toys.context(flow_policy(BRANCHING), 4)
    starts = GRPO(group_size=12).collect(ctx, toys.prompts(4)).trajectory.start
    assert len({tuple(start.flatten().tolist()) for start in starts}) == 48
    whole, chunked = (TEMPFLOW.collect(replace(ctx, rollout_batch_size=size), toys.prompts(4)) for size in (None, 5))
    assert whole.trajectory.start.equal(chunked.trajectory.start)
    torch.testing.assert_close(whole.trajectory.final, chunked.trajectory.final)


@pytest.mark.parametrize(
    ("recipe", "override", "message"),
    [
        ("tempflow-toy-flow", "process.window.size=2", r"objective\.branches.*TM2202"),
        ("tempflow-toy-flow", "process.window=null", r"objective\.branches.*TM2202"),
        ("tempflow-toy-flow", "objective.branches=5", r"branches.*TM088"),
        ("tempflow-toy-flow", "objective.advantage=global", r"branches.*TM088"),
        ("grpo-toy-causal", "objective.branches=2", r"objective\.branches.*TM2201"),
    ],
)
def test_settings_without_one_branching_step_are_refused(recipe: str, override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        require_valid(load(recipe, [override]))
