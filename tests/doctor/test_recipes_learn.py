"""No recipe is only listed: each is examined and trained for two steps, at tiny size."""

import pytest

from tastemaker.config.build import build
from tastemaker.config.load import load, runnable
from tastemaker.doctor.examine import examine
from tastemaker.train.events import Updated
from tastemaker.train.loop import train


@pytest.mark.parametrize("recipe", runnable())
def test_every_recipe_is_sound(recipe):
    findings = list(examine(load(recipe), tiny=True))
    assert len(findings) == 10
    assert [found for found in findings if found.verdict == "fail"] == []


@pytest.mark.parametrize("recipe", runnable())
def test_every_recipe_trains(recipe, tmp_path):
    run = build(load(recipe, ["steps=2", "sample.every=1"]), tmp_path / "run", tiny=True)
    before = {key: p.detach().clone() for key, p in run.policy.weights.trainable().items()}
    updates = [event for event in train(run) if isinstance(event, Updated)]
    assert [event.step for event in updates] == [1, 2]
    assert any(not before[key].equal(p) for key, p in run.policy.weights.trainable().items())
