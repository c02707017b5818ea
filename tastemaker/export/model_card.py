"""The model card of exported weights: base model, usage, scores, license, credits and recipe."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from ..core.model_spec import PipelineLayout
from ..models.pretrained import HUB_ID, WeightsSource
from ..report.run_record import RunRecord

HUB_LICENSES = ("apache-2.0", "mit")  # licenses that the hub knows by name
REPORTED_METRICS = ("reward/", "rewards/", "guard/")  # prefixes of the metrics that measure quality
FOLDER_PLACEHOLDER = "path/of/this/folder"


@dataclass(frozen=True)
class ModelCardData:
    """Everything a model card states."""

    record: RunRecord
    base_model: str  # id on the hub, or a folder
    source: WeightsSource | None  # license and origin of the base model, if known
    method: str  # one sentence
    rewards: Mapping[str, tuple[WeightsSource, ...]]  # sources of the weights of each reward
    step: str
    weights: str
    usage: str  # Markdown
    is_lora: bool
    frames: int = 1  # of a sample


def render_model_card(card: ModelCardData) -> str:
    """Render a model card as Markdown, with the YAML header that the hub reads."""
    relation = "LoRA adapters for" if card.is_lora else "Post-trained from"
    lines = [
        "---",
        yaml.safe_dump(_header(card), sort_keys=False).rstrip(),
        "---",
        f"# {card.record.name}",
        "",
        f"{relation} {_hub_link(card.base_model)}, trained with the recipe below: the {card.weights} weights of "
        f"{card.step.replace('-', ' ')}.",
        "",
        "## Use",
        card.usage,
        "",
        "## Scores",
        *_score_lines(card.record),
        "",
        "## Method and credits",
        *_credit_lines(card),
        "",
        "## Recipe",
        "```yaml",
        card.record.config_text.rstrip(),
        "```",
        "",
    ]
    return "\n".join(lines)


def _header(card: ModelCardData) -> dict[str, Any]:
    base = {}
    if HUB_ID.fullmatch(card.base_model):
        base = {
            "base_model": card.base_model,
            "base_model_relation": "adapter" if card.is_lora else "finetune",
        }
    return {
        **base,
        **_license_fields(card),
        "pipeline_tag": _pipeline_tag(card),
        "library_name": "diffusers",
        "tags": ["tastemaker", *(["lora"] if card.is_lora else [])],
    }


def _pipeline_tag(card: ModelCardData) -> str:
    if card.frames == 1:
        return "text-to-image"
    has_image_condition = "image" in (card.record.config.get("model") or {})
    return "image-to-video" if has_image_condition else "text-to-video"


def _license_fields(card: ModelCardData) -> dict[str, str]:
    """Return the license by the hub's name for it, or as `other` with its own name."""
    name = _license_name(card).lower()
    if name in HUB_LICENSES:
        return {"license": name}
    return {"license": "other", "license_name": re.sub(r"[^\w.]+", "-", name)}


def _license_name(card: ModelCardData) -> str:
    return card.source.license.removeprefix("under ") if card.source else "that of the base model"


def _hub_link(name: str) -> str:
    return f"[{name}](https://huggingface.co/{name})" if HUB_ID.fullmatch(name) else "a local model"


def _score_lines(record: RunRecord) -> list[str]:
    curves = [(name, record.curve(name)) for name in record.metric_names() if name.startswith(REPORTED_METRICS)]
    table = [f"| {name} | {curve[0][1]:.4g} | {curve[-1][1]:.4g} |" for name, curve in curves if len(curve) > 1]
    evaluations = [
        f"- {name}: " + ", ".join(f"{key} {mean:.4g} ({low:.4g} to {high:.4g})" for key, mean, low, high in scores)
        for name, report in record.evaluations.items()
        if (scores := _overall_scores(report))
    ]
    if not table and not evaluations:
        return ["No scores were measured during training."]
    head = ["| metric during training | first | last |", "|---|---|---|"] if table else []
    return [*head, *table, *([""] if table and evaluations else []), *evaluations]


def _overall_scores(report: Mapping[str, Any]) -> Sequence[tuple[str, float, float, float]]:
    """Return name, mean and interval of each overall score of an evaluation."""
    scores = {name: table.get("overall", {}) for name, table in report.get("scores", {}).items()}
    return [(name, x["mean"], x["low"], x["high"]) for name, x in scores.items() if {"mean", "low", "high"} <= x.keys()]


def _credit_lines(card: ModelCardData) -> list[str]:
    rewards = [
        f"- reward `{name}`" + "".join(f", {_hub_link(source.hub)} ({source.license})" for source in sources)
        for name, sources in card.rewards.items()
    ]
    license_name = _license_name(card)
    base = f"- base weights: {_hub_link(card.base_model)}; license: {license_name}, which applies to these weights too"
    return [f"- method: {card.method}", base, *rewards, "- trained with tastemaker"]


# Usage


def read_usage(folder: Path) -> list[str]:
    """The lines of an exported folder's README that say how to load it: Python code, or a sentence for ComfyUI."""
    text = (folder / "README.md").read_text(encoding="utf-8").replace(FOLDER_PLACEHOLDER, str(folder))
    usage = text.partition("## Use\n")[2].partition("\n## ")[0] or text
    code = re.search(r"```python\n(.*?)\n```", usage, re.DOTALL)
    return code[1].splitlines() if code else [line.replace("`", "") for line in usage.splitlines() if line]


def pipeline_snippet(layout: PipelineLayout) -> str:
    """Return Python code that loads an exported pipeline folder with diffusers."""
    return _python_block(layout, [f'pipeline = {layout.pipeline_class}.from_pretrained("{FOLDER_PLACEHOLDER}")'])


def lora_snippet(layout: PipelineLayout, base_model: str, file: str) -> str:
    """Return Python code that loads exported LoRA adapters into their base model.

    Where two components of a pipeline have adapters, diffusers loads them one at a time, all under the name of the
    first component.
    """
    if layout.lora_loader == "tastemaker":
        return tastemaker_snippet()
    if layout.lora_loader == "merge":
        return merge_snippet(layout, base_model, file)
    lines = [f'pipeline = {layout.pipeline_class}.from_pretrained("{base_model}")']
    if not layout.component_prefixes:
        return _python_block(layout, [*lines, f'pipeline.load_lora_weights("{FOLDER_PLACEHOLDER}")'])
    lines += [f'tensors = load_file("{FOLDER_PLACEHOLDER}/{file}").items()']
    for component in layout.components:
        is_first = component == layout.component
        renamed = "key" if is_first else f'key.replace("{component}.", "{layout.component}.")'
        option = "" if is_first else f", load_into_{component}=True"
        lines += [f'{component} = {{{renamed}: x for key, x in tensors if key.startswith("{component}.")}}']
        lines += [f'pipeline.load_lora_weights({component}, adapter_name="{component}"{option})']
    return _python_block(layout, ["from safetensors.torch import load_file", *lines])


def merge_snippet(layout: PipelineLayout, base_model: str, file: str) -> str:
    """Return Python code that adds exported adapters to the weights of a pipeline that loads none itself."""
    lines = [
        "from safetensors.torch import load_file",
        "",
        f'pipeline = {layout.pipeline_class}.from_pretrained("{base_model}")',
        f'factors = load_file("{FOLDER_PLACEHOLDER}/{file}")',
        'for key in [key for key in factors if key.endswith(".lora_A.weight")]:',
        '    component, _, layer = key.removesuffix(".lora_A.weight").partition(".")',
        "    weight = getattr(pipeline, component).get_submodule(layer).weight",
        '    down, up = factors[key], factors[key.replace("lora_A", "lora_B")]',
        "    weight.data += (up.flatten(1) @ down.flatten(1)).view_as(weight).to(weight)",
    ]
    return _python_block(layout, lines)


def tastemaker_snippet() -> str:
    """Return Python code that samples from an exported folder with this package, for models that diffusers lacks."""
    generate = f'videos = tastemaker.generate("{FOLDER_PLACEHOLDER}", ["a lighthouse at dusk"], out="videos")'
    return "\n".join(
        ["diffusers has no pipeline for this model.", "", "```python", "import tastemaker", "", generate, "```"]
    )


def original_lora_snippet(file: str, alpha: float) -> str:
    """Return Python code that adds adapters to the weights of the model in its authors' code."""
    lines = [
        "import torch",
        "",
        f'factors = torch.load("{FOLDER_PLACEHOLDER}/{file}", weights_only=True)',
        'for key in [key for key in factors if key.endswith(".lora_A.weight")]:',
        '    layer = model.get_submodule(key.removeprefix("base_model.model.").removesuffix(".lora_A.weight"))',
        '    down, up = factors[key], factors[key.replace("lora_A", "lora_B")]',
        f"    layer.weight.data += {alpha:g} / len(down) * (up @ down).to(layer.weight)",
    ]
    return "\n".join(["With `model` built by the authors' code:", "", "```python", *lines, "```"])


def _python_block(layout: PipelineLayout, lines: list[str]) -> str:
    return "\n".join(["```python", f"from diffusers import {layout.pipeline_class}", *lines, "```"])
