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

from ..config.load import load_any
from ..config.registries import MODELS
from ..config.run import RunConfig
from ..export import adapters, folder, loading
from ..export.card import Subject, card
from ..export.workflow import WORKFLOWS, Job
from ..lora import Lora, LoraWeights
from ..models.layouts import Layout, Outside
from ..models.published import TINY
from ..pretrained import Published, Source, locate
from ..processes.gaussian import GaussianProcess
from ..processes.paths import Straight
from ..registry import ConfigError
from ..report.read import Record, read
from ..train import checkpoint
from ..types import Placement
from ..weights import Weights
from . import moving
from .directory import CONFIG, RECIPE
from .downloading import sources
from .parting import part, recognised

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Publication:
    """What to write, and how."""

    directory: Path
    out: Path
    layout: Literal["diffusers", "comfyui", "authors"]
    weights: str = ""  # the average if there is one
    dtype: torch.dtype = torch.bfloat16
    merge: bool = False  # adapters into the weights they adapt
    bare: bool = False  # leave out what was not trained
    shard: str = folder.SHARD


@dataclass(frozen=True)
class Trained:
    """A run's network, loaded."""

    config: RunConfig
    layout: Layout
    base: str
    step: Path
    name: str  # of the weights
    net: Any
    weights: Weights


def publish(order: Publication, console: Console) -> None:
    """Write a folder with the weights, the recipe, a card, and a workflow where one is known."""
    if recognised(order.directory):
        return part(order.directory, order.out, order.layout, order.weights, order.dtype, console)
    if order.out.suffix == ".safetensors":
        raise ConfigError(f"--out: '{order.out}' is named as a file; give a folder, which will hold its page too")
    if order.out.exists():
        raise ConfigError(f"--out: {order.out} is there already; name a new folder, or remove it")
    if moving.recognised(order.directory):
        return moved(order, console)
    trained = opened(order)
    partial = order.out.with_name(f".{order.out.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    use = {"diffusers": write_diffusers, "comfyui": comfyui, "authors": authors}[order.layout](order, trained, partial)
    record = read(order.directory)
    (partial / "README.md").write_text(card(subject(order, trained, record, use)), encoding="utf-8")
    shutil.copyfile(order.directory / CONFIG, partial / RECIPE)
    partial.replace(order.out)
    size = sum(path.stat().st_size for path in order.out.rglob("*") if path.is_file()) / 1e6
    return console.print(f"{order.out}: {trained.name} weights of {trained.step.name}, {size:.1f} MB", highlight=False)


def moved(order: Publication, console: Console) -> None:
    """A generator made here, whose network diffusers alone has; adapters are merged."""
    if order.layout != "diffusers":
        raise ConfigError(f"--layout: {order.layout} does not know this model; give diffusers, or leave it out")
    moving.move(moving.Move(order.directory, order.out, order.weights, order.dtype, order.bare, order.shard), console)


def opened(order: Publication) -> Trained:
    """The network with the weights asked for; neither the optimizer nor other snapshots are read."""
    config, spec, layout, step = described(order.directory)
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
    checkpoint.initialise(step, weights, "weights" if name == "live" else f"snapshots/{name}")
    return Trained(config, layout, spec.weights, step, name, model.net, weights)


def described(directory: Path) -> tuple[RunConfig, Outside, Layout, Path]:
    """What a run trained, if others know it, and its last checkpoint."""
    step = checkpoint.latest(directory)
    if not (directory / CONFIG).is_file() or step is None:
        raise ConfigError(f"{directory} has no checkpoint to export; give the directory of a run")
    config = load_any(directory / CONFIG)
    if not isinstance(config, RunConfig) or not isinstance(config.model, Outside):
        known = ", ".join(name for name in MODELS if isinstance(MODELS.find(name, "model")(), Outside))
        raise ConfigError(f"--layout: only published models are known to others ({known}); leave it out for your own")
    return config, config.model, config.model.layout, step


def write_diffusers(order: Publication, trained: Trained, out: Path) -> str:
    """Adapters in one file, or the pipeline's folder; how to load it is returned."""
    layout, base = trained.layout, trained.base
    if isinstance(trained.weights, LoraWeights) and not order.merge:
        adapters.write_diffusers(trained.weights, layout, out / adapters.FILE, order.dtype)
        return loading.adapters(layout, base, adapters.FILE)
    if not order.bare:
        folder.copy_parts(locate(base, Source(base)), layout, out)
    trained_tensors = tensors(order, trained)
    for name, begins in layout.parts.items():
        own = {key.removeprefix(begins): x for key, x in trained_tensors.items() if key.startswith(begins)}
        folder.write_part(trained.net.get_submodule(begins.rstrip(".")), own, out / name, order.shard)
    if order.bare:
        return " ".join(f"The folder `{name}` replaces that of {base}." for name in layout.parts)
    return loading.whole(layout)


def comfyui(order: Publication, trained: Trained, out: Path) -> str:
    """One file, and a workflow that uses it."""
    alone = isinstance(trained.weights, LoraWeights) and not order.merge
    file = f"{order.out.name}.safetensors"
    if alone and isinstance(trained.weights, LoraWeights):
        adapters.write_comfyui(trained.weights, trained.layout, out / file, order.dtype)
    else:
        theirs = trained.layout.authors(tensors(order, trained), trained.net.config)
        save_file({key: x.contiguous() for key, x in theirs.items()}, out / file, {"format": "pt"})
    place = f"Put `{file}` into ComfyUI's `models/{'loras' if alone else 'diffusion_models'}`."
    draw = WORKFLOWS.get(trained.layout.workflow)
    if draw is None:
        return place
    nodes = draw(job(trained, file, adapters=alone))
    (out / "workflow.json").write_text(json.dumps(nodes, indent=1) + "\n", encoding="utf-8")
    return f"{place} Then open `workflow.json` in ComfyUI; it samples as the run did."


def authors(order: Publication, trained: Trained, out: Path) -> str:
    """One file under the names of those who made the model, for their own programs."""
    if isinstance(trained.weights, LoraWeights) and not order.merge:
        adapters.write_authors(trained.weights, trained.layout, out / f"{order.out.name}.pt")
        held = f"`{order.out.name}.pt` holds adapters under the authors' names, of alpha {trained.layout.alpha:g}"
        beside = f", and those of {', '.join(trained.weights.texts)} beside them" if trained.weights.texts else ""
        return f"{held}{beside}; `tastemaker generate RECIPE --lora` reads it too."
    first = trained.net.get_submodule(trained.layout.parts[trained.layout.part].rstrip("."))
    theirs = trained.layout.authors(tensors(order, trained), first.config)
    save_file({key: x.contiguous() for key, x in theirs.items()}, out / f"{order.out.name}.safetensors")
    return f"`{order.out.name}.safetensors` holds the network under its authors' names."


def job(trained: Trained, file: str, *, adapters: bool) -> Job:
    spec: Any = trained.config.model
    process = trained.config.process
    steps = process.steps if isinstance(process, GaussianProcess) else 25
    straight = isinstance(process, GaussianProcess) and isinstance(process.path, Straight)
    shift = process.path.shift if straight else 1.0  # type: ignore[attr-defined]  # asked above
    return Job(file, adapters, steps, shift, spec.height, spec.width, spec.guidance)


def tensors(order: Publication, trained: Trained) -> dict[str, Tensor]:
    """Of the whole network, adapters in it."""
    merged = isinstance(trained.weights, LoraWeights)
    own: Mapping[str, Tensor] = trained.weights.merged() if merged else trained.net.state_dict()  # type: ignore[attr-defined]
    return {key: x.detach().to(order.dtype) if x.is_floating_point() else x for key, x in own.items()}


def subject(order: Publication, trained: Trained, record: Record, use: str) -> Subject:
    """All that the card tells."""
    spec, config = trained.config.model, trained.config
    known = spec.sources if isinstance(spec, Published) else ()
    return Subject(
        record=record,
        base=trained.base,
        source=known[0] if known else None,
        method=(type(config.objective).__doc__ or "").strip().splitlines()[0],
        rewards={name: tuple(sources(reward.spec)) for name, reward in config.rewards.items()},
        step=trained.step.name,
        weights=trained.name,
        use=use,
        adapters=isinstance(trained.weights, LoraWeights) and not order.merge,
        frames=config.model.frames,
    )
