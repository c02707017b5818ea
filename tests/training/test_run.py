"""A run gives each rank its own random numbers, and restores the state of its objective."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tastemaker.config.build import build
from tastemaker.config.load import load
from tastemaker.core.objective import SingleProcess
from tastemaker.core.randomness import Purpose
from tastemaker.training.loop import train_step
from tastemaker.training.run import Run

SETTINGS = [
    "sample.every=0",
    "guard.every=0",
    "batch.prompts=8",
    "process.num_steps=3",
    "objective.tracker_min_count=2",
]


def build_run(directory: Path) -> Run:
    return build(load("ddpo-toy-epsilon", SETTINGS), directory)


@pytest.mark.parametrize("world_size", [2, 4])
def test_noise_of_several_ranks_equals_that_of_one(world_size: int, tmp_path: Path) -> None:
    run, samples = build_run(tmp_path), 8 // world_size
    expected = run.context(3, 8)
    contexts = []
    for rank in range(world_size):
        run.engine.data_parallel = SingleProcess(rank, world_size)
        contexts.append(run.context(3, samples))
    noise = torch.cat([ctx.rng.normal(Purpose.INITIAL_NOISE, 5) for ctx in contexts])
    assert noise.equal(expected.rng.normal(Purpose.INITIAL_NOISE, 5)) and len(noise.unique(dim=0)) == 8
    assert [ctx.first_row for ctx in contexts] == list(range(0, 8, samples))


def test_resume_restores_prompt_statistics(tmp_path: Path) -> None:
    run, resumed = build_run(tmp_path / "run"), build_run(tmp_path / "resumed")
    train_step(run, 0)
    statistics = run.objective_state.state_dict()
    assert sum(len(rewards) for rewards in statistics["rewards"].values()) == 8
    resumed.resume(run.save(1))
    assert resumed.start_step == 1 and resumed.objective_state.state_dict() == statistics
    for each in (run, resumed):
        train_step(each, 1)
    weights, expected = (each.policy.weights.trainable() for each in (resumed, run))
    assert all(weights[key].equal(x) for key, x in expected.items())
