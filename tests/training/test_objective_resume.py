"""Runs of each objective that resume within one process: the next step is the same to the bit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file
from torch import Tensor

from tastemaker.config.build import build
from tastemaker.config.load import load
from tastemaker.training.events import StepCompleted
from tastemaker.training.loop import train

RECIPES = (
    "elbo-grpo-toy-flow",
    "grpo-guard-toy-flow",
    "flow-dppo-toy-flow",
    "drpo-toy-causal",
    "tempflow-toy-flow",
    "precise-toy-flow",
    "leap-toy-flow",
    "kto-toy-flow",
    "kto-toy-causal",
    "kto-online-toy-epsilon",
    "mapo-toy-flow",
    "mapo-online-toy-flow",
    "nft-select-toy-flow",
    "grpo-win-rate-toy-flow",
    "norm-guard-toy-flow",
)
# Two epochs and two minibatches: a ratio that is not 1, and orders that depend on the step.
SETTINGS = ("steps=3", "batch.prompts=4", "batch.epochs=2", "sample.every=0", "guard.every=0", "checkpoint.every=2")


def read_state(checkpoint: Path) -> dict[str, Tensor]:
    """Weights, optimizer state and snapshots of a checkpoint."""
    files = sorted(checkpoint.rglob("*.safetensors"))
    return {f"{file.relative_to(checkpoint)}/{key}": x for file in files for key, x in load_file(file).items()}


@pytest.mark.slow
@pytest.mark.parametrize("recipe", RECIPES)
def test_next_step_of_a_resumed_run_is_the_same_to_the_bit(recipe: str, tmp_path: Path) -> None:
    config = load(recipe, list(SETTINGS))
    uninterrupted, resumed = (build(config, tmp_path / name) for name in ("uninterrupted", "resumed"))
    expected = [event for event in train(uninterrupted) if isinstance(event, StepCompleted)]
    first = tmp_path / "uninterrupted/checkpoints/step-000002"
    resumed.resume(first)
    (step,) = [event for event in train(resumed) if isinstance(event, StepCompleted)]
    assert (step.step, step.metrics) == (3, expected[-1].metrics)
    last, again = (tmp_path / name / "checkpoints/step-000003" for name in ("uninterrupted", "resumed"))
    states = read_state(last), read_state(again)
    assert states[0].keys() == states[1].keys() and len(states[0]) > 0
    assert [key for key, x in states[0].items() if not x.equal(states[1][key])] == []
    assert json.loads((last / "state.json").read_text()) == json.loads((again / "state.json").read_text())
    moved = read_state(first)
    assert any(not x.equal(moved[key]) for key, x in states[0].items() if key.startswith("weights"))
