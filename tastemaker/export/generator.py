"""`tastemaker export --layout`: a published model, trained, in the layouts that diffusers and ComfyUI load."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from rich.console import Console
from safetensors.torch import save_file
from torch import Tensor

from ..config.load import load_any_config
from ..config.registries import MODELS
from ..config.schema import RunConfig
from ..core.lora import Lora, LoraWeights
from ..core.registry import ConfigError
from ..core.types import Placement
from ..core.weights import Weights
from ..models.downloads import spec_sources
from ..models.pipeline_components import TINY
from ..models.pipeline_layout import HasPipelineLayout, PipelineLayout
from ..models.pretrained import HasWeightsSources, WeightsSource, find_weights
from ..processes.gaussian import GaussianProcess
from ..processes.paths import RectifiedFlow
from ..report.run_record import RunRecord, read_run
from ..training import checkpoint
from ..training.resume import CONFIG_FILE, RECIPE_FILE
from . import diffusers_pipeline, dit_pipeline, lora, usage_snippets
from .autoencoder import export_autoencoder, is_autoencoder_run
from .comfyui import WORKFLOWS, ComfyWorkflowSettings
from .model_card import ModelCardData, render_model_card

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class GeneratorExport:
    """What to write, and how."""

    directory: Path
    out: Path
    layout: Literal["diffusers", "comfyui", "authors"]
    weights: str = ""  # the average if there is one
    dtype: torch.dtype = torch.bfloat16
    merge: bool = False  # adapters into the weights they adapt
    bare: bool = False  # leave out what was not trained
    shard: str = diffusers_pipeline.MAX_SHARD_SIZE


@dataclass(frozen=True)
class TrainedGenerator:
    """A run's network, loaded."""

    config: RunConfig
    layout: PipelineLayout
    base: str
    step: Path
    name: str  # of the weights
    net: Any
    weights: Weights


def export_generator(order: GeneratorExport, console: Console) -> None:
    """Write a folder with the weights, the recipe, a card, and a workflow where one is known."""
    if is_autoencoder_run(order.directory):
        return export_autoencoder(order.directory, order.out, order.layout, order.weights, order.dtype, console)
    if order.out.suffix == ".safetensors":
        raise ConfigError(f"--out: '{order.out}' is named as a file; give a folder, which will hold its page too")
    if order.out.exists():
        raise ConfigError(f"--out: {order.out} is there already; name a new folder, or remove it")
    if dit_pipeline.is_dit_run(order.directory):
        return export_own_generator(order, console)
    trained = load_trained_generator(order)
    partial = order.out.with_name(f".{order.out.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    use = {"diffusers": write_diffusers, "comfyui": write_comfyui, "authors": write_original_layout}[order.layout](
        order, trained, partial
    )
    record = read_run(order.directory)
    (partial / "README.md").write_text(render_model_card(card_subject(order, trained, record, use)), encoding="utf-8")
    shutil.copyfile(order.directory / CONFIG_FILE, partial / RECIPE_FILE)
    partial.replace(order.out)
    size = sum(path.stat().st_size for path in order.out.rglob("*") if path.is_file()) / 1e6
    return console.print(f"{order.out}: {trained.name} weights of {trained.step.name}, {size:.1f} MB", highlight=False)


def export_own_generator(order: GeneratorExport, console: Console) -> None:
    """A generator made here, whose network diffusers alone has; adapters are merged."""
    if order.layout != "diffusers":
        raise ConfigError(f"--layout: {order.layout} does not know this model; give diffusers, or leave it out")
    dit_pipeline.export_dit_pipeline(
        dit_pipeline.DitExport(order.directory, order.out, order.weights, order.dtype, order.bare, order.shard), console
    )


def load_trained_generator(order: GeneratorExport) -> TrainedGenerator:
    """The network with the weights asked for; neither the optimizer nor other snapshots are read."""
    config, spec, layout, step = find_checkpoint(order.directory)
    adapted = isinstance(config.tuning, Lora)
    if order.layout != "authors" and not layout.pipeline:
        raise ConfigError(f"--layout: {order.layout} does not know {type(spec).__name__}; give authors")
    if order.layout == "comfyui" and not layout.adapters and layout.pipeline:
        raise ConfigError(f"--layout: ComfyUI's names in {type(spec).__name__} are not known here; give diffusers")
    if order.merge and not adapted:
        raise ConfigError("--merge: this run trained no adapters; leave it out")
    whole = order.layout == "diffusers" and not order.bare and (order.merge or not adapted)
    if whole and spec.weights == TINY:
        raise ConfigError("the run was of small random weights, of which there is no pipeline; add --bare")
    kept = sorted(path.name.removesuffix(".safetensors") for path in step.glob("snapshots/*"))
    name = order.weights or ("ema" if "ema" in kept else "live")
    if name != "live" and name not in kept:
        raise ConfigError(f"--weights: the run keeps no '{name}' (there are: {', '.join(['live', *kept])})")
    model = config.model.load(Placement(dtype=order.dtype))
    weights = config.tuning.apply(model, ())
    for p in weights.trainable().values() if isinstance(weights, LoraWeights) else ():
        p.data = p.data.float()  # multiplied with each other before they are rounded
    checkpoint.initialize_weights(step, weights, "weights" if name == "live" else f"snapshots/{name}")
    return TrainedGenerator(config, layout, spec.weights, step, name, model.net, weights)


def find_checkpoint(directory: Path) -> tuple[RunConfig, HasPipelineLayout, PipelineLayout, Path]:
    """What a run trained, if others know it, and its last checkpoint."""
    step = checkpoint.latest(directory)
    if not (directory / CONFIG_FILE).is_file() or step is None:
        raise ConfigError(f"{directory} has no checkpoint to export; give the directory of a run")
    config = load_any_config(directory / CONFIG_FILE)
    if not isinstance(config, RunConfig) or not isinstance(config.model, HasPipelineLayout):
        known = ", ".join(name for name in MODELS if isinstance(MODELS.find(name, "model")(), HasPipelineLayout))
        raise ConfigError(f"--layout: only published models are known to others ({known}); leave it out for your own")
    return config, config.model, config.model.layout, step


def write_diffusers(order: GeneratorExport, trained: TrainedGenerator, out: Path) -> str:
    """Adapters in one file, or the pipeline's folder; how to load it is returned."""
    layout, base = trained.layout, trained.base
    if isinstance(trained.weights, LoraWeights) and not order.merge:
        lora.write_diffusers_lora(trained.weights, layout, out / lora.DIFFUSERS_LORA_FILE, order.dtype)
        return usage_snippets.lora_snippet(layout, base, lora.DIFFUSERS_LORA_FILE)
    if not order.bare:
        diffusers_pipeline.copy_other_components(find_weights(base, WeightsSource(base)), layout, out)
    trained_tensors = merged_tensors(order, trained)
    for name, begins in layout.parts.items():
        own = {key.removeprefix(begins): x for key, x in trained_tensors.items() if key.startswith(begins)}
        diffusers_pipeline.save_component(trained.net.get_submodule(begins.rstrip(".")), own, out / name, order.shard)
    if order.bare:
        return " ".join(f"The folder `{name}` replaces that of {base}." for name in layout.parts)
    return usage_snippets.pipeline_snippet(layout)


def write_comfyui(order: GeneratorExport, trained: TrainedGenerator, out: Path) -> str:
    """One file, and a workflow that uses it."""
    alone = isinstance(trained.weights, LoraWeights) and not order.merge
    file = f"{order.out.name}.safetensors"
    if alone and isinstance(trained.weights, LoraWeights):
        lora.write_comfyui_lora(trained.weights, trained.layout, out / file, order.dtype)
    else:
        theirs = trained.layout.authors(merged_tensors(order, trained), trained.net.config)
        save_file({key: x.contiguous() for key, x in theirs.items()}, out / file, {"format": "pt"})
    place = f"Put `{file}` into ComfyUI's `models/{'loras' if alone else 'diffusion_models'}`."
    draw = WORKFLOWS.get(trained.layout.workflow)
    if draw is None:
        return place
    nodes = draw(workflow_job(trained, file, adapters=alone))
    (out / "workflow.json").write_text(json.dumps(nodes, indent=1) + "\n", encoding="utf-8")
    return f"{place} Then open `workflow.json` in ComfyUI; it samples as the run did."


def write_original_layout(order: GeneratorExport, trained: TrainedGenerator, out: Path) -> str:
    """One file under the names of those who made the model, for their own programs."""
    if isinstance(trained.weights, LoraWeights) and not order.merge:
        lora.write_original_lora(trained.weights, trained.layout, out / f"{order.out.name}.pt")
        held = f"`{order.out.name}.pt` holds adapters under the authors' names, of alpha {trained.layout.alpha:g}"
        beside = f", and those of {', '.join(trained.weights.texts)} beside them" if trained.weights.texts else ""
        return f"{held}{beside}; `tastemaker generate RECIPE --lora` reads it too."
    first = trained.net.get_submodule(trained.layout.parts[trained.layout.part].rstrip("."))
    theirs = trained.layout.authors(merged_tensors(order, trained), first.config)
    save_file({key: x.contiguous() for key, x in theirs.items()}, out / f"{order.out.name}.safetensors")
    return f"`{order.out.name}.safetensors` holds the network under its authors' names."


def workflow_job(trained: TrainedGenerator, file: str, *, adapters: bool) -> ComfyWorkflowSettings:
    spec: Any = trained.config.model
    process = trained.config.process
    steps = process.steps if isinstance(process, GaussianProcess) else 25
    straight = isinstance(process, GaussianProcess) and isinstance(process.path, RectifiedFlow)
    shift = process.path.shift if straight else 1.0  # type: ignore[attr-defined]  # asked above
    return ComfyWorkflowSettings(file, adapters, steps, shift, spec.height, spec.width, spec.guidance)


def merged_tensors(order: GeneratorExport, trained: TrainedGenerator) -> dict[str, Tensor]:
    """Of the whole network, adapters in it."""
    merged = isinstance(trained.weights, LoraWeights)
    own: Mapping[str, Tensor] = trained.weights.merged() if merged else trained.net.state_dict()  # type: ignore[attr-defined]
    return {key: x.detach().to(order.dtype) if x.is_floating_point() else x for key, x in own.items()}


def card_subject(order: GeneratorExport, trained: TrainedGenerator, record: RunRecord, use: str) -> ModelCardData:
    """All that the card tells."""
    spec, config = trained.config.model, trained.config
    known = spec.sources if isinstance(spec, HasWeightsSources) else ()
    return ModelCardData(
        record=record,
        base=trained.base,
        source=known[0] if known else None,
        method=(type(config.objective).__doc__ or "").strip().splitlines()[0],
        rewards={name: tuple(spec_sources(reward.spec)) for name, reward in config.rewards.items()},
        step=trained.step.name,
        weights=trained.name,
        use=use,
        adapters=isinstance(trained.weights, LoraWeights) and not order.merge,
        frames=config.model.frames,
    )
