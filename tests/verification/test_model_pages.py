"""The generated tables of models and of what is verified say what specs and results say."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

from tastemaker.config.registries import OBJECTIVES
from tastemaker.verification.models import load_spec
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


@pytest.mark.slow
def test_tables_of_models_have_every_model_and_objective(pages: ModuleType) -> None:
    text = pages.expand_markers((DOCS / "models.md").read_text(encoding="utf-8"))
    lines = {line.split("|")[1].strip(): line for line in text.splitlines() if line.startswith("| `")}
    assert {f"`{name}`" for name in pages.published_models()} <= set(lines)
    assert "text-to-image, editing" in lines["`flux-kontext`"] and "image-to-video" in lines["`svd`"]
    assert "class-to-image" in lines["`llamagen`"] and "832x480, 81 frames" in lines["`wan`"]
    assert "| yes | diffusers, ComfyUI |" in lines["`flux`"] and "| no | diffusers |" in lines["`cogvideox`"]
    assert all(f"`{name}`" in text for name in OBJECTIVES) and "<!--" not in text
