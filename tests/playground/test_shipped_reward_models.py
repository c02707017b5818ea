"""The reward models that come with the package, on held-out scenes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tastemaker.models.weight_files import PACKAGE_ROOT
from tastemaker.playground.network_files import load_network
from tastemaker.playground.train_reward_models import (
    ALL_NETWORKS,
    TASKS_BY_NAME,
    TRAINED_TWICE,
    evaluate_task,
    network_file,
)
from tastemaker.playground.training_tasks import TrainingTask

WEIGHTS = PACKAGE_ROOT / "playground" / "weights"
# The accuracy targets, less the uncertainty of a thousand scenes.
TARGETS = {
    "detector": {"class": 0.99, "colour": 0.98, "number of things": 0.98, "verdict": 0.985, "lenient verdict": 0.985},
    "scorer": {"of two captions": 0.9, "of two pictures": 0.85, "quality": 0.9},
    "judge": {"yes of finished": 0.85, "yes of clear": 0.75, "clear": 0.8},
    "taste": {"pairs": 0.85, "sound before flawed": 0.9},
    "motion": {"motion": 0.98, "motion of flawed": 0.95, "none": 0.93, "none of frozen": 0.98},
}
weights_exist = all(network_file(name, seed, WEIGHTS).is_file() for name, seed in ALL_NETWORKS)
pytestmark = pytest.mark.skipif(
    not weights_exist, reason="the reward models are not trained; run `train_reward_models all`"
)


def shipped_task(name: str, seed: int) -> TrainingTask[Any]:
    make, kind = TASKS_BY_NAME[name]
    return make(load_network(kind, network_file(name, seed, WEIGHTS)))


def below_target(name: str, seed: int, count: int, allowed: float) -> dict[str, float]:
    accuracies = evaluate_task(shipped_task(name, seed), "noto", count, torch.device("cpu"), at_once=64)
    return {key: accuracies[key] for key, target in TARGETS[name].items() if accuracies[key] < target - allowed}


@pytest.mark.parametrize(("name", "seed"), [each for each in ALL_NETWORKS if each != ("motion", 1)])
def test_shipped_reward_models_load(name: str, seed: int) -> None:
    """A network that is loaded or called wrongly fails on a few scenes already."""
    count = 64 if TASKS_BY_NAME[name][0].frames == 1 else 32
    assert below_target(name, seed, count, allowed=2 / count) == {}  # two more errors than the target are allowed


@pytest.mark.slow
@pytest.mark.parametrize(("name", "seed"), ALL_NETWORKS)
def test_shipped_reward_models_meet_accuracy_targets(name: str, seed: int) -> None:
    assert below_target(name, seed, 1024 if TASKS_BY_NAME[name][0].frames == 1 else 256, allowed=0.0) == {}


def test_shipped_reward_models_meet_size_limits() -> None:
    assert sum(network_file(name, seed, WEIGHTS).stat().st_size for name, seed in ALL_NETWORKS) <= 15e6


@pytest.mark.parametrize("name", TRAINED_TWICE)
def test_networks_of_two_seeds_differ(name: str) -> None:
    first, second = (shipped_task(name, seed).net.head.weight for seed in (0, 1))
    assert not torch.equal(first, second)
