"""Every recipe of a published generator is planned, with tiny networks in the place of the published sizes."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

from tastemaker.config.build import make_tiny
from tastemaker.config.load import list_generator_recipes, load
from tastemaker.core.types import Placement
from tastemaker.diagnostics.plan import estimate_resources
from tastemaker.models.component_configs import ComponentConfigs
from tastemaker.models.ltx2 import Ltx2Spec
from tastemaker.models.pipeline_components import PublishedSpec

# VADER's recipes of a model differ in their rewards only; the networks of toys and of the playground are not planned.
RECIPES = [
    name
    for name in list_generator_recipes()
    if not re.search("toy|playground", name) and (not name.startswith("vader-") or name.endswith("-hps"))
]
FAST = {"draft-flux2-klein", "dpo-janus", "vader-wan-i2v-hps"}  # images, tokens and videos
SLOW = {  # one of each new model
    "draft-z-image-turbo", "grpo-qwen-image-21", "grpo-qwen-image-edit", "grpo-sana-sprint", "nft-flux-schnell",
    "reward-gradient-sana", "vader-hunyuanvideo15-hps", "vader-ltx2-hps",
}  # fmt: skip
POOLED_WIDTH = 1280  # of the embedding that every plan of SDXL assumes


def fit_to_plan(configs: ComponentConfigs) -> ComponentConfigs:
    """Tiny configurations, with the pooled embedding of the published size."""
    unet: dict[str, Any] = configs.get("unet", {})
    if "addition_embed_type" not in unet:
        return configs
    width = POOLED_WIDTH + 6 * int(unet["addition_time_embed_dim"])
    return {**configs, "unet": {**unet, "projection_class_embeddings_input_dim": width}}


@pytest.mark.parametrize(
    "recipe",
    [
        pytest.param(name, marks=() if name in FAST else pytest.mark.slow if name in SLOW else pytest.mark.long)
        for name in RECIPES
    ],
)
def test_every_recipe_is_planned(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = load(recipe)
    small, spec = make_tiny(config), config.model
    if isinstance(spec, PublishedSpec):
        published = spec.published
        hub = spec.weights if spec.weights in published.configs else published.releases[0].hub
        tiny: Any = small.model
        monkeypatch.setitem(published.configs, hub, fit_to_plan(tiny.components(Placement()).configs))
        length = {"max_text_tokens": 128} if isinstance(spec, Ltx2Spec) else {}  # a multiple of its learned tokens
        small = replace(small, model=replace(tiny, weights=hub, **length))
    estimate = estimate_resources(small)
    assert estimate.weights > 0 and estimate.optimizer_state > 0 and estimate.gradients > 0
    assert estimate.update_activations > 0 and estimate.update_flops > 0
    assert 0 < estimate.total < 40e9  # the published networks have more weights, or rewards of up to 16 GB beside them


def test_every_recipe_is_in_one_set() -> None:
    assert set(RECIPES) >= FAST | SLOW and not FAST & SLOW
