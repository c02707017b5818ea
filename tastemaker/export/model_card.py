"""The model card of exported weights: base model, usage, scores, license, credits and recipe."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from ..core.model_spec import PipelineLayout
from ..data.image_io import encode_png
from ..models.pretrained import HUB_ID, WeightsSource
from ..report.headline import find_evaluation_pair
from ..report.run_record import RunRecord
from ..report.sample_sets import read_sample_grid
from .publishable import publishable_config

HUB_LICENSES = ("apache-2.0", "mit")  # licenses that the hub knows by name
REPORTED_METRICS = ("reward/", "rewards/", "guard/")  # prefixes of the metrics that measure quality
FOLDER_PLACEHOLDER = "path/of/this/folder"
BASE_PLACEHOLDER = "path/of/the/base/model"
GALLERY_FOLDER, GALLERY_SIZE = "images", 8


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
    objective: str = ""  # its name in recipes
    library: str = "diffusers"  # that loads the weights
    gallery: tuple[tuple[str, str], ...] = ()  # prompt and file of samples beside the card


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
        *(["## Samples", "<Gallery />", ""] if card.gallery else []),
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
        publishable_config(card.record.config_text).rstrip(),
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
        "library_name": "peft" if card.is_lora and card.library == "transformers" else card.library,
        "tags": ["tastemaker", *([card.objective] if card.objective else []), *(["lora"] if card.is_lora else [])],
        **({"widget": [_widget(*each) for each in card.gallery]} if card.gallery else {}),
    }


def _widget(prompt: str, file: str) -> dict[str, Any]:
    """An entry of the hub's gallery."""
    return {"text": prompt or " ", "output": {"url": file}}


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


def public_name(base_model: str) -> str:
    """The base model's id on the hub, or a placeholder for a local folder, whose path nobody else has."""
    return base_model if HUB_ID.fullmatch(base_model) else BASE_PLACEHOLDER


def write_gallery(record: RunRecord, out: Path) -> list[tuple[str, str]]:
    """Write the last samples of a run beside the card; of videos their middle frame. Returns prompts and files."""
    if not record.sample_grids:
        return []
    samples = read_sample_grid(record.sample_grids[-1], record.name).take(GALLERY_SIZE)
    (out / GALLERY_FOLDER).mkdir()
    gallery = []
    for i, (pixels, prompt) in enumerate(zip(samples.pixels, samples.prompts, strict=True)):
        file = f"{GALLERY_FOLDER}/{i}.png"
        middle = len(pixels) // 2
        (out / file).write_bytes(encode_png(pixels[middle : middle + 1]))
        gallery.append((prompt, file))
    return gallery


def _score_lines(record: RunRecord) -> list[str]:
    curves = [(name, record.curve(name)) for name in record.metric_names() if name.startswith(REPORTED_METRICS)]
    table = [f"| {name} | {curve[0][1]:.4g} | {curve[-1][1]:.4g} |" for name, curve in curves if len(curve) > 1]
    compared, shown = _comparison_lines(record)
    evaluations = [
        f"- {name}: " + ", ".join(f"{key} {mean:.4g} ({low:.4g} to {high:.4g})" for key, mean, low, high in scores)
        for name, report in record.evaluations.items()
        if name not in shown and (scores := _overall_scores(report))
    ]
    if not table and not evaluations and not compared:
        return ["No scores were measured during training."]
    head = ["| metric during training | first | last |", "|---|---|---|"] if table else []
    blocks = [block for block in (compared, [*head, *table], evaluations) if block]
    return [line for i, block in enumerate(blocks) for line in ([""] if i else []) + block]


def _comparison_lines(record: RunRecord) -> tuple[list[str], list[str]]:
    """A table of an evaluation before and after training with 95 % intervals, and the evaluations that it shows."""
    pair = find_evaluation_pair(record)
    if pair is None or pair.before is None:
        return [], []
    before, after = (
        {name: (mean, low, high) for name, mean, low, high in _overall_scores(record.evaluations[each])}
        for each in (pair.before, pair.after)
    )
    rows = [f"| {name} | {_interval(before[name])} | {_interval(after[name])} |" for name in after if name in before]
    benchmark = str(record.evaluations[pair.after].get("benchmark", "")) or pair.after
    head = [f"| {benchmark}, with 95 % intervals | before | after step {pair.step} |", "|---|---|---|"]
    return ([*head, *rows], [pair.before, pair.after]) if rows else ([], [])


def _interval(score: tuple[float, float, float]) -> str:
    mean, low, high = score
    return f"{mean:.4g} ({low:.4g} to {high:.4g})"


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


def read_usage(folder: Path, base_model: str = "") -> list[str]:
    """The lines of an exported folder's README that say how to load it: Python code, or a sentence for ComfyUI."""
    text = (folder / "README.md").read_text(encoding="utf-8").replace(FOLDER_PLACEHOLDER, str(folder))
    text = text.replace(BASE_PLACEHOLDER, base_model or BASE_PLACEHOLDER)
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
    lines = [f'pipeline = {layout.pipeline_class}.from_pretrained("{public_name(base_model)}")']
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
        f'pipeline = {layout.pipeline_class}.from_pretrained("{public_name(base_model)}")',
        f'factors = load_file("{FOLDER_PLACEHOLDER}/{file}")',
        'for key in [key for key in factors if key.endswith(".lora_A.weight")]:',
        '    component, _, layer = key.removesuffix(".lora_A.weight").partition(".")',
        "    weight = getattr(pipeline, component).get_submodule(layer).weight",
        '    down, up = factors[key], factors[key.replace("lora_A", "lora_B")]',
        "    weight.data += (up.flatten(1) @ down.flatten(1)).view_as(weight).to(weight)",
    ]
    return _python_block(layout, lines)


def transformers_snippet(model_class: str) -> str:
    """Return Python code that loads an exported folder with transformers."""
    return _transformers_block([f"from transformers import {model_class}", ""], model_class, FOLDER_PLACEHOLDER, [])


def peft_snippet(model_class: str, base_model: str) -> str:
    """Return Python code that loads exported adapters into their base model of transformers."""
    imports = ["from peft import PeftModel", f"from transformers import {model_class}", ""]
    load = [f'model = PeftModel.from_pretrained(model, "{FOLDER_PLACEHOLDER}").merge_and_unload()']
    return _transformers_block(imports, model_class, public_name(base_model), load)


def _transformers_block(imports: list[str], model_class: str, name: str, lines: list[str]) -> str:
    load = f'model = {model_class}.from_pretrained("{name}")'
    return "\n".join(["```python", *imports, load, *lines, "```"])


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
