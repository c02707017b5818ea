"""The generated tables of models and of what is verified say what specs and results say."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest

from tastemaker.config.registries import OBJECTIVES
from tastemaker.verification.models import list_models, load_spec
from tastemaker.verification.report import Entry, write_report

TOOLS = Path(__file__).parent.parent.parent / "tools"
DOCS = TOOLS.parent / "docs"


@pytest.fixture
def pages() -> ModuleType:
    """A fresh copy of the module, whose caches are empty."""
    spec = importlib.util.spec_from_file_location("model_pages", TOOLS / "model_pages.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_contributed_results_are_shown_and_others_are_nobodys(
    pages: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pages, "RESULTS", tmp_path)
    made = {"device": "NVIDIA H200", "dtype": "fp32", "versions": {"torch": "2.13.0"}}
    write_report(tmp_path / "old.json", [Entry("hps", "reward", "failed", "bad", date="2026-01-01", **made)])
    new = [Entry("hps", "reward", "matched", date="2026-12-01", **made), Entry("clip", "reward", "not tried", **made)]
    write_report(tmp_path / "a.json", [*new, Entry("clip", "reward", "runs", "none published", tiny=True, **made)])
    lines = pages.expand_markers("<!-- generated: verified rewards -->").splitlines()
    rows = {line.split("|")[1].strip(): line for line in lines}
    assert "| matched (NVIDIA H200, fp32, 2026-12-01) | - |" in rows["`hps`"]
    assert "| nobody | runs: none published |" in rows["`clip`"]
    assert pages.expand_markers("<!-- generated: verified versions -->") == "- NVIDIA H200: torch 2.13.0"


def test_the_results_of_this_repository_can_be_read_and_nothing_in_them_failed(pages: ModuleType) -> None:
    for kind in ("model", "reward"):
        entries = pages.latest_entries(kind)
        assert entries and not [name for (name, _), entry in entries.items() if entry.status == "failed"]


def test_every_model_was_verified_with_tiny_weights(pages: ModuleType) -> None:
    verified = {name for name, tiny in pages.latest_entries("model") if tiny}
    assert set(list_models()) - verified == set(), "run: tastemaker verify NAME --tiny, and add to docs/verification"


def test_tasks_are_those_of_our_models(pages: ModuleType) -> None:
    """Qwen-Image 2.1's pipeline reads images, our model does not."""
    tasks = {
        name: pages.find_tasks(load_spec(name)) for name in ("qwen-image-21", "flux2", "wan-i2v", "playground-edit")
    }
    assert tasks == {
        "qwen-image-21": ["text-to-image"],
        "flux2": ["text-to-image", "editing"],
        "wan-i2v": ["image-to-video"],
        "playground-edit": ["text-to-image", "editing"],
    }


WITHOUT_MEMORY = {  # models and why their table has no memory
    **dict.fromkeys(("playground-causal", "playground-masked"), "small enough for any computer"),
    **dict.fromkeys(("playground-flow", "playground-flow16", "playground-epsilon"), "small enough for any computer"),
    **dict.fromkeys(("playground-edit", "playground-video", "playground-words"), "small enough for any computer"),
}


def test_every_model_has_memory_or_a_reason(pages: ModuleType) -> None:
    memory = json.loads(pages.MEMORY.read_text(encoding="utf-8"))["models"]
    specs = pages.published_models()
    assert set(specs) - set(memory) == set(WITHOUT_MEMORY)
    assert {name: row["size"] for name, row in memory.items()} == {
        name: pages.describe_size(specs[name]) for name in memory
    }
    assert all(row["peak"] > 5e8 for row in memory.values())


def test_objectives_and_precision_are_those_of_recipes(pages: ModuleType) -> None:
    recipes = pages.recipes_of_models()
    turbo = recipes["z-image-turbo"].values()
    assert {type(each.objective).__name__ for each in turbo} == {"GRPO", "NFT", "RewardGradient"}
    assert {each.engine.precision for each in recipes["z-image"].values()} == {"bf16"}
    assert all(recipes[name] for name in pages.published_models())


def test_models_of_few_steps_are_those_that_were_distilled(pages: ModuleType) -> None:
    text = pages.expand_markers((DOCS / "few-steps.md").read_text(encoding="utf-8"))
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| `")]
    steps = {row[0]: row[1:] for row in rows if row[1].isdigit()}
    assert steps.keys() == {"`flux-schnell`", "`flux2-klein`", "`sana-sprint`", "`z-image-turbo`"}
    assert steps["`flux-schnell`"] == ["4", "`nft-flux-schnell`"]
    assert steps["`sana-sprint`"] == ["2", "`grpo-sana-sprint`, `reward-gradient-sana-sprint`"]


@pytest.mark.slow
def test_tables_of_models_have_every_model_and_objective(pages: ModuleType) -> None:
    text = pages.expand_markers((DOCS / "models.md").read_text(encoding="utf-8"))
    names = [f"`{name}`" for name in pages.published_models()]
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| `")]
    models, abilities = ({row[0]: row[1:] for row in rows if len(row) == width} for width in (6, 7))
    assert list(models) == list(abilities) == names
    expected = ["text-to-image, editing", "1024x1024", "34 GB", "FLUX.1 [dev] Non-Commercial"]
    assert models["`flux-kontext`"][1:] == expected
    assert models["`llamagen`"][1] == "class-to-image" and models["`wan`"][2] == "832x480, 81 frames"
    assert models["`svd`"][1] == "image-to-video" and models["`playground-flow`"][3:] == ["included", "-"]
    assert abilities["`flux`"][3:] == ["yes", "diffusers, ComfyUI", "nobody"]
    assert abilities["`cogvideox`"][3:5] == ["no", "diffusers"]
    assert all(f"`{name}`" in text for name in OBJECTIVES) and "<!--" not in text
    assert text.count('<div class="whole-names" markdown>') == text.count("</div>") == 3
