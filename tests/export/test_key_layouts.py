"""Names of exported adapters: every model has a row in the documentation, and its pipeline loads every adapter."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from tiers import fast
from tiny_pipelines import load_adapters
from torch import nn

from tastemaker.config.registries import MODELS
from tastemaker.core.lora import Lora, LoraWeights
from tastemaker.core.model_spec import PipelineLayout
from tastemaker.core.types import Placement
from tastemaker.export.key_layouts import models_with_layout, replace_layout_table
from tastemaker.export.lora import DIFFUSERS_LORA_FILE, LORA_A, LORA_B, write_diffusers_lora
from tastemaker.models.flux2 import DEV, Flux2Spec
from tastemaker.models.pipeline_components import PublishedSpec
from tastemaker.verification.whole_pipelines import make_qwen_image_21_pipeline

TEXT = (Path(__file__).parents[2] / "docs" / "export.md").read_text(encoding="utf-8")
LAYOUTS = models_with_layout()
# Models whose adapters a pipeline of diffusers loads; new ones are tested as soon as they are in the registry.
LOADED = [
    name
    for name, layout in LAYOUTS.items()
    if layout.library == "diffusers" and layout.pipeline_class and layout.lora_loader == "pipeline"
]


def test_table_of_key_layouts_is_up_to_date() -> None:
    assert replace_layout_table(TEXT) == TEXT, "run: make schema"


def test_every_published_model_is_in_the_table() -> None:
    published = [name for name in MODELS if issubclass(MODELS.find(name, "model"), PublishedSpec)]
    assert [name for name in published if not re.search(rf"^\| `{name}`", TEXT, re.MULTILINE)] == []


def make_pipeline(layout: PipelineLayout, components: dict[str, nn.Module]) -> Any:
    """The pipeline of a layout with its trained components only, if it can be made of these."""
    if layout.pipeline_class == "QwenImage21Pipeline":  # reads its processor when it is made
        pipeline = make_qwen_image_21_pipeline()
        pipeline.register_modules(**components)
        return pipeline
    pipeline_class: Any = getattr(diffusers, layout.pipeline_class)
    parameters = inspect.signature(pipeline_class.__init__).parameters.values()
    required = [p.name for p in parameters if p.name != "self" and p.default is p.empty and p.kind != p.VAR_KEYWORD]
    return pipeline_class(**{**dict.fromkeys(required), **components})


@pytest.mark.parametrize("name", fast([*LOADED, "flux2-dev"], "sd3"))
def test_pipeline_loads_every_exported_adapter(name: str, tmp_path: Path) -> None:
    dev = Flux2Spec(weights=DEV.hub)  # its pipeline is another one than that of klein
    spec: Any = dev if name == "flux2-dev" else MODELS.find(name, "model")()
    spec, layout = spec.tiny(), spec.layout
    assert (layout.pipeline_class == "Flux2Pipeline") == (name == "flux2-dev")
    model = spec.load(Placement())
    weights = Lora(rank=2, alpha=6).apply(model, ())
    assert isinstance(weights, LoraWeights)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in weights.trainable().values():
            p.copy_(torch.randn(p.shape, generator=generator))
    write_diffusers_lora(weights, layout, tmp_path / DIFFUSERS_LORA_FILE, torch.float32)

    fresh = spec.load(Placement()).net
    components = {component: fresh.get_submodule(prefix.rstrip(".")) for component, prefix in layout.components.items()}
    load_adapters(make_pipeline(layout, components), layout, tmp_path)
    loaded = {
        re.sub(r"\.(lora_[AB])\.[^.]+\.weight$", r".\1.weight", key): p
        for key, p in fresh.named_parameters()
        if "lora_" in key
    }
    expected = weights.trainable()
    assert loaded.keys() == expected.keys()
    for key, p in expected.items():
        scaled = p * 3 if key.endswith(LORA_B) else p
        torch.testing.assert_close(loaded[key], scaled, msg=key)
    assert any(key.endswith(LORA_A) for key in loaded)
