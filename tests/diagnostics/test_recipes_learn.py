"""No recipe is only listed: each is examined by the doctor or trained for two steps, at tiny size."""

import re

import pytest

from tastemaker.autoencoders import training
from tastemaker.config.build import build, build_autoencoder, make_tiny_any
from tastemaker.config.load import (
    list_generator_recipes,
    list_judge_recipes,
    list_trainable_recipes,
    load,
    load_any_config,
)
from tastemaker.config.schema import RunConfig
from tastemaker.diagnostics.doctor import run_doctor
from tastemaker.training.events import StepCompleted
from tastemaker.training.loop import train

# Of VADER's, which differ in their rewards alone, one for each model.
RECIPES = [
    name for name in list_generator_recipes() if not name.startswith("vader-") or re.fullmatch(r"vader-\w+-hps", name)
]
# Examined every time: a policy gradient on each kind of process, and a gradient through the reward.
EXAMINED_FIRST = {"grpo-toy-flow", "grpo-toy-causal", "grpo-toy-masked", "draft-toy-flow"}
# All toys and one of the playground's networks of each kind, so that every objective meets every process ...
EXAMINED_TOYS = {name for name in RECIPES if "toy" in name} | {
    "dpo-playground-masked", "grpo-playground-causal", "nft-playground", "reward-gradient-playground-video",
}  # fmt: skip
# ... and one published network of each kind: transformers and U-Nets of pictures and of clips, and of tokens.
EXAMINED_PUBLISHED = {
    "dpo-showo", "draft-sd15", "flowgrpo-sd35", "grpo-llamagen", "mixgrpo-flux", "reward-gradient-dit-folder",
    "vader-opensora-hps",
}  # fmt: skip
EXAMINED = EXAMINED_FIRST | EXAMINED_TOYS | EXAMINED_PUBLISHED
TRAINED_FIRST = {name for name in RECIPES if "toy" in name} - EXAMINED_FIRST - {"cca-toy-causal", "srpo-toy-flow"}


def small(recipe: str, monkeypatch: pytest.MonkeyPatch, *more: str) -> RunConfig:
    """A recipe, of a published network with few samples a step; toys and the playground are small enough."""
    config = load(recipe, list(more))
    if "toy" in recipe or "playground" in recipe:
        return config
    monkeypatch.setattr("tastemaker.config.build.TINY_BATCH_SIZE", 8)
    return load(recipe, [*more, "objective.group_size=4"]) if config.objective.group_size > 4 else config


def tiers(first: set[str], slow: set[str]) -> list[object]:
    """Every recipe, those of neither set in complete sweeps alone."""
    assert first | slow <= set(RECIPES)
    marks = {name: () if name in first else pytest.mark.slow if name in slow else pytest.mark.long for name in RECIPES}
    return [pytest.param(name, marks=each) for name, each in marks.items()]


@pytest.mark.parametrize("recipe", tiers(EXAMINED_FIRST, EXAMINED))
def test_doctor_passes_every_recipe(recipe, monkeypatch):
    config = small(recipe, monkeypatch) if recipe in EXAMINED_PUBLISHED else load(recipe)
    findings = list(run_doctor(config, tiny=True))
    assert len(findings) == 10
    assert [found for found in findings if found.verdict == "fail"] == []


@pytest.mark.parametrize("recipe", tiers(TRAINED_FIRST, set(RECIPES) - EXAMINED))
def test_every_recipe_trains(recipe, tmp_path, monkeypatch):
    few = ["steps=2", "sample.every=2", "sample.count=2", "guard.every=0"]
    run = build(small(recipe, monkeypatch, *few), tmp_path / "run", tiny=True)
    before = {key: p.detach().clone() for key, p in run.policy.weights.trainable().items()}
    updates = [event for event in train(run) if isinstance(event, StepCompleted)]
    assert [event.step for event in updates] == [1, 2]
    assert any(not before[key].equal(p) for key, p in run.policy.weights.trainable().items())


AUTOENCODERS = sorted(set(list_trainable_recipes()) - set(list_generator_recipes()) - set(list_judge_recipes()))


@pytest.mark.parametrize(
    "recipe", [pytest.param(name, marks=[] if name == "playground-vae" else pytest.mark.slow) for name in AUTOENCODERS]
)
def test_every_autoencoder_recipe_trains(recipe, tmp_path, monkeypatch):
    monkeypatch.setattr(training, "LATENT_STATISTICS_IMAGES", 8)  # pictures that latents are settled on
    config = make_tiny_any(load_any_config(recipe, ["steps=2", "sample.every=1", "batch_size=4"]))
    run = build_autoencoder(config, tmp_path / "run")
    updates = [event for event in training.train(run) if isinstance(event, StepCompleted)]
    assert [event.step for event in updates] == [1, 2]
