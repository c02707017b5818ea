"""Every recipe is checked by the doctor or trained for two steps, at tiny size."""

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

# One recipe per model of VADER, whose recipes differ in their rewards only.
RECIPES = [
    name
    for name in list_generator_recipes()
    if not name.startswith("vader-") or re.fullmatch(r"vader-\w+(-t?i2v)?-hps", name)
]
# Checked in the fast set: a policy gradient on each kind of process, and a gradient through the reward.
CHECKED_FAST = {"grpo-toy-flow", "grpo-toy-causal", "grpo-toy-masked", "draft-toy-flow"}
# One toy of each objective, and one playground network of each kind ...
CHECKED_TOYS = {
    "awm-toy-flow", "cca-toy-causal", "crd-toy-flow", "ddpo-toy-epsilon", "dgpo-toy-flow", "distill-toy-flow",
    "dpo-online-toy-flow", "dpo-toy-masked", "drpo-toy-causal", "elbo-grpo-toy-masked", "epg-toy-flow",
    "flow-dppo-toy-flow", "gcpo-toy-causal", "grpo-guard-toy-flow", "grpo-lora-toy-flow", "grpo-toy-video",
    "grpo-win-rate-toy-flow", "kto-online-toy-epsilon", "kto-toy-flow", "leap-toy-flow", "likelihood-toy-masked",
    "mapo-online-toy-flow", "mapo-toy-flow", "mixgrpo-toy-flow", "nft-select-toy-flow", "norm-guard-toy-flow",
    "ram-toy-flow", "refl-toy-epsilon", "srpo-toy-flow", "teacher-forced-grpo-toy-causal", "tempflow-toy-flow",
    "dpo-playground-masked", "grpo-playground-causal", "nft-playground", "reward-gradient-playground-video",
}  # fmt: skip
# ... and one published network of each kind: transformers and U-Nets for images, video and tokens.
CHECKED_PUBLISHED = {
    "dancegrpo-wan-i2v", "dpo-showo", "flowgrpo-sd35", "grpo-flux2-klein", "grpo-janus", "grpo-llamagen", "grpo-ltx2",
    "grpo-qwen-image-21", "grpo-sana-sprint", "grpo-z-image-turbo", "nft-hunyuanvideo15", "nft-qwen-image-edit",
    "nft-z-image", "reward-gradient-dit-folder", "vader-opensora-hps",
}  # fmt: skip
# Sampled in three steps, two samples of two prompts each: even tiny networks and decoders of these take long.
SHORTENED = re.compile(r".*-(qwen-image-(21|edit)|sana|z-image(-turbo)?|(wan|wan22)-t?i2v|hunyuanvideo15|ltx2)(-hps)?")
CHECKED = CHECKED_FAST | CHECKED_TOYS | CHECKED_PUBLISHED
# Half a minute to minutes each, or on a network and with an objective that recipes of the other sets have too.
LONG = {
    "srpo-mochi-hps", "vader-mochi-hps", "vader-svd-hps", "vader-modelscope-hps", "vader-videocrafter2-hps",
    "awm-sd35", "draft-sd15", "epg-sd35", "mixgrpo-flux", "srpo-flux-hps-lora", "srpo-flux-pickscore",
    "srpo-qwen-image-lora", "vgrpo-sd35",
    "ar-grpo-t2i", "dpo-iter-showo-512", "dpo-showo-512", "gcpo-llamagen-t2i", "showo-512-finetune", "va-pi-t2i",
    "crd-playground-flow", "ddpo-playground-video", "dgpo-playground-flow", "direct-align-playground-flow",
    "dpo-iter-playground-masked", "dpo-playground-flow", "dpo-playground-video", "drpo-playground-causal",
    "elbo-grpo-playground-epsilon", "mapo-pairs-playground-flow", "precise-playground-flow", "tempflow-playground-flow",
    "elbo-grpo-playground-flow", "flow-dppo-playground-flow", "grpo-guard-playground-flow", "kto-playground-flow",
    "leap-playground-flow", "nft-playground-flow", "playground-flow16", "playground-words", "ram-playground-flow",
    "reward-gradient-playground-flow", "reward-gradient-playground-lenient",
}  # fmt: skip
LONG_AUTOENCODERS = {"llamagen-vq8"}
# Its teacher is the student with guidance. The last layer of a new tiny network is zero, so that both predict the same.
WITHOUT_CHANGE = {"distill-playground-flow"}
TRAINED_FAST = {name for name in RECIPES if "toy" in name} - CHECKED_FAST - {"cca-toy-causal", "srpo-toy-flow"}


def load_small(recipe: str, monkeypatch: pytest.MonkeyPatch, *overrides: str) -> RunConfig:
    """Load a recipe, with few samples per step for published networks."""
    config = load(recipe, list(overrides))
    if "toy" in recipe or "playground" in recipe:
        return config
    monkeypatch.setattr("tastemaker.config.build.TINY_BATCH_SIZE", 8)
    if SHORTENED.fullmatch(recipe):
        return load(recipe, [*overrides, *shorten(config)])
    if config.objective.group_size <= 4:
        return config
    # Half of a group per update, as with the published group of eight.
    halved = ["objective.samples_per_call=2"] if recipe == "grpo-llamagen-tf-quickstart" else []
    return load(recipe, [*overrides, "objective.group_size=4", *halved])


def shorten(config: RunConfig) -> list[str]:
    """Overrides for few steps and samples."""
    settings, names = ["batch.prompts=2", "batch.minibatches=1"], vars(config.objective)
    if config.process.num_steps > 4:
        settings.append("process.num_steps=3")
    if getattr(config.process, "window", None) is not None:
        settings.append("process.window={size: 1, start_max: 0}")
    smaller = {"group_size": 2, "num_timesteps": 2}
    return settings + [f"objective.{name}={number}" for name, number in smaller.items() if names.get(name, 0) > number]


def tiers(fast: set[str], slow: set[str]) -> list[object]:
    """Return every recipe with its mark; recipes in neither set are long."""
    assert fast | slow <= set(RECIPES)
    marks = {name: () if name in fast else pytest.mark.slow if name in slow else pytest.mark.long for name in RECIPES}
    return [pytest.param(name, marks=each) for name, each in marks.items()]


@pytest.mark.parametrize("recipe", tiers(CHECKED_FAST, CHECKED))
def test_doctor_passes_every_recipe(recipe, monkeypatch):
    config = load_small(recipe, monkeypatch) if recipe in CHECKED_PUBLISHED else load(recipe)
    results = list(run_doctor(config, tiny=True))
    assert len(results) == 11
    assert [result for result in results if result.verdict == "fail"] == []


@pytest.mark.parametrize("recipe", tiers(TRAINED_FAST, set(RECIPES) - CHECKED - LONG))
def test_every_recipe_trains(recipe, tmp_path, monkeypatch):
    settings = ["steps=2", "sample.every=2", "sample.count=2", "guard.every=0"]
    run = build(load_small(recipe, monkeypatch, *settings), tmp_path / "run", tiny=True)
    before = {key: p.detach().clone() for key, p in run.policy.weights.trainable().items()}
    updates = [event for event in train(run) if isinstance(event, StepCompleted)]
    assert [event.step for event in updates] == [1, 2]
    changed = any(not before[key].equal(p) for key, p in run.policy.weights.trainable().items())
    assert changed or recipe in WITHOUT_CHANGE


AUTOENCODERS = [
    name
    for name in sorted(set(list_trainable_recipes()) - set(list_generator_recipes()) - set(list_judge_recipes()))
    if not name.startswith("preference-")  # tests/preferences train those
]


def autoencoder_mark(name: str) -> object:
    if name in LONG_AUTOENCODERS:
        return pytest.mark.long
    return () if name == "playground-vae" else pytest.mark.slow


@pytest.mark.parametrize("recipe", [pytest.param(name, marks=autoencoder_mark(name)) for name in AUTOENCODERS])
def test_every_autoencoder_recipe_trains(recipe, tmp_path, monkeypatch):
    monkeypatch.setattr(training, "LATENT_STATISTICS_IMAGES", 8)  # for the latent statistics
    config = make_tiny_any(load_any_config(recipe, ["steps=2", "sample.every=1", "batch_size=4"]))
    run = build_autoencoder(config, tmp_path / "run")
    updates = [event for event in training.train(run) if isinstance(event, StepCompleted)]
    assert [event.step for event in updates] == [1, 2]
