"""No recipe is only listed: each is examined and trained for two steps, at tiny size."""

import re

import pytest

from tastemaker.config.build import build, build_autoencoder, shrunk_any
from tastemaker.config.load import load, load_any, runnable, teaching, trainable
from tastemaker.doctor.examine import examine
from tastemaker.train import autoencoder
from tastemaker.train.events import Updated
from tastemaker.train.loop import train

# Tiny versions of published networks have all their parts, and take their time; the playground's are many.
FAST = {recipe for recipe in runnable() if "toy" in recipe} | {"reward-gradient-playground", "nft-playground"}
ALIKE = {name for name in runnable() if name.startswith("vader-") and not re.fullmatch(r"vader-\w+-hps", name)}
# One of each objective and of each family are examined every time; all of them are trained.
FIRST = {f"{name}-toy-flow" for name in ("grpo", "dpo", "nft", "srpo", "draft")} | {
    "grpo-toy-causal", "grpo-toy-masked", "grpo-toy-video", "ddpo-toy-epsilon", "cca-toy-causal",
    "reward-gradient-playground",
}  # fmt: skip
RECIPES = [  # of VADER's, which differ in their rewards alone, one for each model
    pytest.param(recipe, marks=() if recipe in FAST else pytest.mark.slow)
    for recipe in runnable()
    if recipe not in ALIKE
]


@pytest.mark.parametrize(
    "recipe",
    [pytest.param(*each.values, marks=() if each.values[0] in FIRST else pytest.mark.slow) for each in RECIPES],
)
def test_every_recipe_is_sound(recipe):
    findings = list(examine(load(recipe), tiny=True))
    assert len(findings) == 10
    assert [found for found in findings if found.verdict == "fail"] == []


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_recipe_trains(recipe, tmp_path):
    run = build(load(recipe, ["steps=2", "sample.every=1"]), tmp_path / "run", tiny=True)
    before = {key: p.detach().clone() for key, p in run.policy.weights.trainable().items()}
    updates = [event for event in train(run) if isinstance(event, Updated)]
    assert [event.step for event in updates] == [1, 2]
    assert any(not before[key].equal(p) for key, p in run.policy.weights.trainable().items())


AUTOENCODERS = sorted(set(trainable()) - set(runnable()) - set(teaching()))


@pytest.mark.parametrize(
    "recipe", [pytest.param(name, marks=[] if "playground" in name else pytest.mark.slow) for name in AUTOENCODERS]
)
def test_every_recipe_of_an_autoencoder_trains(recipe, tmp_path):
    config = shrunk_any(load_any(recipe, ["steps=2", "sample.every=1", "rows=4"]))
    run = build_autoencoder(config, tmp_path / "run")
    updates = [event for event in autoencoder.train(run) if isinstance(event, Updated)]
    assert [event.step for event in updates] == [1, 2]
