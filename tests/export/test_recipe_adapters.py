"""Adapters of every recipe whose model has a pipeline: exported for diffusers, and the same when loaded again."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from rich.console import Console
from untrained_runs import save_perturbed_run

from tastemaker.config.build import make_tiny
from tastemaker.config.load import list_generator_recipes, load
from tastemaker.config.schema import RunConfig
from tastemaker.core.lora import LoraWeights
from tastemaker.core.types import Placement
from tastemaker.export.generator import GeneratorExport, export_generator
from tastemaker.export.lora import DIFFUSERS_LORA_FILE, LoraFromFile
from tastemaker.export.modelspec import usage_hint

PLAIN = [
    "engine={device: cpu, precision: fp32, param_dtype: fp32}",
    *("rewards=null", "rewards={brightness: {type: brightness}}"),
    *("ema_decay=0", "sample.weights=live", "name=run"),
]
FAST = {"grpo-flux2-klein", "grpo-z-image", "vader-wan-i2v-hps"}


def load_plain(recipe: str, *overrides: str) -> RunConfig:
    """The tiny recipe with a reward without weights, and with adapters if it trains all weights."""
    config = load(recipe)
    tuning = [] if config.tuning.is_adapter else ["tuning=null", "tuning={type: lora, rank: 2}"]
    return make_tiny(load(recipe, [*PLAIN, *tuning, *overrides]))


def distinct_recipes() -> dict[str, str]:
    """Recipes that differ in their tiny model or their adapters, with the key of both."""
    found: dict[str, str] = {}
    for name in list_generator_recipes():
        if "toy" in name or "playground" in name:
            continue
        spec, tuning = load(name).model.tiny(), load(name).tuning
        layout = spec.layout
        if (
            layout is not None
            and layout.pipeline_class
            and layout.library == "diffusers"
            and layout.lora_loader != "tastemaker"
        ):
            found.setdefault(f"{spec} {tuning}", name)
    return {name: key for key, name in found.items()}


def export_and_compare(recipe: str, folder: Path) -> None:
    config = load_plain(recipe, f"output_dir={folder}")
    run, layout = save_perturbed_run(config), config.model.layout
    options = GeneratorExport(run.directory, folder / "out", "diffusers", dtype=torch.float32)
    export_generator(options, Console(quiet=True))
    trained = run.policy.weights
    loaded = LoraFromFile(folder / "out" / DIFFUSERS_LORA_FILE, layout).apply(config.model.load(Placement()), ())
    assert isinstance(trained, LoraWeights) and isinstance(loaded, LoraWeights)
    expected, actual = trained.merged(), loaded.merged()
    base = config.model.load(Placement()).net.state_dict()
    assert set(actual) == set(expected), recipe
    for name, x in expected.items():
        torch.testing.assert_close(actual[name], x, atol=1e-5, rtol=1e-5, msg=f"{recipe}: {name}")
    assert any(not torch.equal(x, base[name]) for name, x in expected.items()), recipe


@pytest.mark.parametrize("recipe", sorted(FAST))
def test_adapters_come_back(recipe: str, tmp_path: Path) -> None:
    export_and_compare(recipe, tmp_path)


def test_usage_hint_of_guidance_that_differs_by_frame() -> None:
    assert usage_hint(load("vader-svd-hps")) == "25 steps, guidance 1 to 3"


@pytest.mark.slow
def test_adapters_of_every_recipe_come_back(tmp_path: Path) -> None:
    recipes = distinct_recipes()
    assert len(recipes) > 30
    for recipe in recipes:
        export_and_compare(recipe, tmp_path / recipe)
