"""Tables about models and rewards for the documentation, from specs, layouts, objectives and results of verification.

`tools/docs_pages.py` puts them in the place of lines such as `<!-- generated: models -->` while the site is built, so
that a new model appears by itself. Memory comes from model_memory.json, which `tools/model_memory.py` writes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import Any

from tastemaker.config.dump import registered_name
from tastemaker.config.load import list_generator_recipes, load
from tastemaker.config.recipes import read_yaml_mapping, recipe_paths
from tastemaker.config.registries import MODELS, OBJECTIVES, PROCESSES, REWARDS
from tastemaker.config.schema import RunConfig
from tastemaker.core.cards import WeightsSource
from tastemaker.core.model_spec import ModelSpec
from tastemaker.verification.models import list_models, load_spec
from tastemaker.verification.report import Entry, read_report

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "docs" / "verification"  # files of `tastemaker verify`
MEMORY = Path(__file__).with_name("model_memory.json")
MARKER = re.compile(r"^<!-- generated: ([a-z ]+) -->$", re.MULTILINE)
NOBODY = "nobody"
SHOWN = {"matched": "matched", "runs": "runs", "failed": "**failed**"}
GIB = 2**30


def expand_markers(text: str) -> str:
    """The text of a page with its generated tables."""
    return MARKER.sub(lambda match: TABLES[match[1]](), text)


def table(head: list[str], rows: Iterable[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', '/') for cell in line)} |" for line in lines)


# Models


@cache
def published_models() -> dict[str, ModelSpec]:
    """The specs of all models but the toys, by the name of their part or type."""
    return {name: load_spec(name) for name, kind in list_models().items() if not kind.startswith("toy_")}


def keep_names_whole(text: str) -> str:
    """A table in a block that docs/site.css styles: no name in it breaks in the middle."""
    return f'<div class="whole-names" markdown>\n\n{text}\n\n</div>'


def models_table() -> str:
    """One line per model: what it generates, its size, download and license."""
    head = ["model", "type", "tasks", "size", "download", "license"]
    rows = []
    for name, spec in published_models().items():
        source = spec.sources[0] if spec.sources else None
        rows.append(
            [
                f"`{name}`",
                f"`{list_models()[name]}`",
                ", ".join(find_tasks(spec)),
                describe_size(spec),
                describe_download(source),
                shorten_license(source.license) if source else "-",
            ]
        )
    return keep_names_whole(table(head, rows))


def describe_download(source: WeightsSource | None) -> str:
    """The size of the published weights, if somebody has written it down."""
    if source is None:
        return "included"
    return "-" if source.size == WeightsSource.size else source.size


def shorten_license(text: str) -> str:
    """A license without the words that the head of its column says."""
    return re.sub(r" license( agreement)?(?=;| \(|$)", "", text, flags=re.IGNORECASE)


def abilities_table() -> str:
    """One line per model: objectives and precision of its recipes, memory, ranks, exports, and who verified it."""
    memory = json.loads(MEMORY.read_text(encoding="utf-8"))["models"] if MEMORY.is_file() else {}
    results = latest_entries("model")
    head = ["model", "objectives", "precision", "memory", "context parallel", "export", "verified"]
    recipes = recipes_of_models()
    rows = []
    for name, spec in published_models().items():
        measured, configs = memory.get(name, {}), recipes[name].values()
        rows.append(
            [
                f"`{name}`",
                ", ".join(sorted({f"`{registered_name(type(each.objective))}`" for each in configs})) or "-",
                ", ".join(sorted({each.engine.precision for each in configs})) or "-",
                f"{measured['peak'] / GIB:.1f} GiB" if measured else "-",
                "yes" if spec.supports_context_parallel else "no",
                ", ".join(export_targets(spec)) or "-",
                describe_result(results.get((name, False))),
            ]
        )
    return keep_names_whole(table(head, rows))


def few_steps_table() -> str:
    """One line per model that was distilled to few steps, with its recipes."""
    rows = [
        [f"`{name}`", str(spec.distilled_steps), ", ".join(f"`{recipe}`" for recipe in recipes_of_models()[name])]
        for name, spec in published_models().items()
        if spec.distilled_steps is not None
    ]
    return keep_names_whole(table(["model", "steps", "recipes"], rows))


@cache
def recipes_of_models() -> dict[str, dict[str, RunConfig]]:
    """The configurations of the recipes of each model by their names, by the name of its part or type."""
    configs: dict[str, dict[str, RunConfig]] = {name: {} for name in published_models()}
    for recipe in list_generator_recipes():
        part = find_model_part(recipe_paths()[recipe])
        name = part or MODELS.name(type(load(recipe).model))
        if name in configs:
            configs[name][recipe] = load(recipe)
    return configs


def find_model_part(path: Path) -> str:
    """The last part of a model that a recipe extends, directly or through others; empty if it extends none."""
    parents = read_yaml_mapping(path).get("extends") or []
    found = ""
    for parent in [parents] if isinstance(parents, str) else parents:
        if parent.startswith("models/"):
            found = parent.removeprefix("models/")
        elif parent in recipe_paths():
            found = find_model_part(recipe_paths()[parent]) or found
    return found


def find_tasks(spec: ModelSpec) -> list[str]:
    """What a model generates, and from what."""
    settings: Any = spec
    names = {each.name for each in fields(settings)}
    target = "video" if spec.frames > 1 else "image"
    if "conditioning" in names and settings.conditioning != "caption":
        return [f"class-to-{target}"]
    if not spec.reads_image:
        return [f"text-to-{target}"]
    from_image = "image-to-video" if target == "video" else "editing"
    return [from_image] if spec.needs_initial_image else [f"text-to-{target}", from_image]


def describe_size(spec: ModelSpec) -> str:
    """Width, height and frames of a sample."""
    settings: Any = spec
    names = {each.name for each in fields(settings)}
    if {"height", "width"} <= names:
        return describe_pixels(spec.frames, settings.height, settings.width)
    return describe_pixels(spec.frames, settings.image_size, settings.image_size) if "image_size" in names else "-"


def describe_pixels(frames: int, height: int, width: int) -> str:
    return f"{width}x{height}" + (f", {frames} frames" if frames > 1 else "")


def export_targets(spec: ModelSpec) -> list[str]:
    """What loads an exported model or adapter."""
    layout = spec.layout
    if layout is None:
        return ["diffusers"] if spec.converts_to_diffusers else []
    targets = ["diffusers"] if layout.pipeline_class and layout.lora_loader != "tastemaker" else []
    return targets + (["ComfyUI"] if layout.comfyui_lora_prefix else [])


def objectives_table() -> str:
    """The objectives that train each process, and what they need."""
    rows = []
    for name in PROCESSES:
        process = PROCESSES.find(name)
        working = [each for each in OBJECTIVES if issubclass(process, OBJECTIVES.find(each).needs)]
        models = [f"`{model}`" for model, spec in published_models().items() if issubclass(spec.process_type, process)]
        rows.append([f"`{name}`", ", ".join(f"`{each}`" for each in working), ", ".join(models)])
    return keep_names_whole(table(["process", "objectives", "models"], rows))


# Verification


@cache
def latest_entries(kind: str) -> dict[tuple[str, bool], Entry]:
    """The newest result of each model or reward, by name and whether it had tiny weights."""
    entries = [entry for path in sorted(RESULTS.glob("*.json")) for entry in read_report(path).entries]
    newest = sorted((entry for entry in entries if entry.kind == kind), key=lambda entry: entry.date)
    return {(entry.name, entry.tiny): entry for entry in newest if entry.status != "not tried"}


def describe_result(entry: Entry | None) -> str:
    """Status, device and date; `nobody` if nobody has tried."""
    if entry is None:
        return NOBODY
    return f"{SHOWN[entry.status]} ({entry.device}, {entry.dtype}, {entry.date})"


def describe_tiny(entry: Entry | None) -> str:
    """What a comparison with tiny random weights found."""
    if entry is None:
        return "-"
    return f"{SHOWN[entry.status]}: {entry.reason}" if entry.reason else SHOWN[entry.status]


def verification_table(kind: str, names: Iterable[str]) -> str:
    results = latest_entries(kind)
    rows = [
        [f"`{name}`", describe_result(results.get((name, False))), describe_tiny(results.get((name, True)))]
        for name in names
    ]
    return table([kind, "published weights", "tiny random weights"], rows)


def verified_versions() -> str:
    """The versions with which the results were made."""
    entries = [entry for kind in ("model", "reward") for entry in latest_entries(kind).values()]
    versions = {(entry.device, tuple(sorted(entry.versions.items()))) for entry in entries}
    lines = [(device, ", ".join(f"{name} {number}" for name, number in each)) for device, each in sorted(versions)]
    return "\n".join(f"- {device}: {text}" for device, text in lines)


TABLES: dict[str, Callable[[], str]] = {
    "models": models_table,
    "abilities": abilities_table,
    "few steps": few_steps_table,
    "objectives": objectives_table,
    "verified models": lambda: verification_table("model", list_models()),
    "verified rewards": lambda: verification_table("reward", REWARDS),
    "verified versions": verified_versions,
}
