"""`tastemaker export --layout diffusers` of a generator made here whose network diffusers has: a DiT of classes."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console

from ..config.dump import config_to_dict
from ..config.load import load_any_config
from ..config.schema import RunConfig
from ..config.yaml_io import render_yaml
from ..core.registry import ConfigError
from ..core.types import Placement
from ..models.autoencoder_loading import load_autoencoder
from ..models.pipeline_layout import ConvertibleToDiffusers, DiffusersConversion
from ..processes.gaussian import GaussianProcess
from ..processes.paths import RectifiedFlow, VariancePreserving
from ..search.diffusers_scheduler import make_scheduler
from ..training import checkpoint
from ..training.resume import CONFIG_FILE, RECIPE_FILE
from . import diffusers_pipeline
from .weights_file import DEVICE, choose_weights, load_weights

VAE, SCHEDULER = "vae", "scheduler"


@dataclass(frozen=True)
class DitExport:
    """Which run to write where, and how."""

    directory: Path
    out: Path
    weights: str = ""  # the average if there is one
    dtype: torch.dtype = torch.bfloat16
    bare: bool = False  # the network alone
    shard: str = diffusers_pipeline.MAX_SHARD_SIZE


def is_dit_run(directory: Path) -> bool:
    """Whether a directory is of a run of such a generator."""
    file = directory / CONFIG_FILE
    config = load_any_config(file) if file.is_file() else None
    return isinstance(config, RunConfig) and isinstance(config.model, ConvertibleToDiffusers)


def export_dit_pipeline(order: DitExport, console: Console) -> None:
    """Write the folder, whole or not at all, and say what is to be known of it."""
    import diffusers

    changes = [DEVICE, "engine.compile=false", "engine.strategy=replicated"]
    config, step = load_any_config(order.directory / CONFIG_FILE, changes), checkpoint.latest(order.directory)
    if step is None or not isinstance(config, RunConfig) or not isinstance(config.model, ConvertibleToDiffusers):
        raise ConfigError(f"{order.directory} has no checkpoint to export; give the directory of a run")
    tensors, chosen = choose_weights(load_weights(config, order.directory, step), order.weights)
    moved = config.model.moved({key: x.detach().to(order.dtype) for key, x in tensors.items()})
    partial = order.out.with_name(f".{order.out.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    with torch.device("meta"):
        net = getattr(diffusers, moved.kind)(**moved.settings)
    diffusers_pipeline.save_component(net, moved.tensors, partial / moved.part, order.shard)
    said = [] if order.bare else write_pipeline_components(config, config.model, moved, partial, order.dtype)
    said += [moved.differs] if moved.differs else []
    (partial / RECIPE_FILE).write_text(write_recipe(order.directory, moved, partial), encoding="utf-8")
    (partial / "README.md").write_text(model_card(config, moved, partial, said), encoding="utf-8")
    partial.replace(order.out)
    console.print(f"{order.out}: {chosen} weights of {step.name}", highlight=False, soft_wrap=True)
    for sentence in said:
        console.print(sentence, markup=False, highlight=False, soft_wrap=True)


def write_pipeline_components(
    config: RunConfig, spec: ConvertibleToDiffusers, moved: DiffusersConversion, out: Path, dtype: torch.dtype
) -> list[str]:
    """What a pipeline has beside its network, as far as diffusers knows it; sentences about what it does not."""
    import diffusers

    from ..models.autoencoder_kl import DiffusersVae

    net = load_autoencoder(spec.codec, Placement()) if spec.codec else None
    process = config.process
    path = process.path if isinstance(process, GaussianProcess) else None
    if isinstance(path, RectifiedFlow | VariancePreserving):
        kind = "FlowMatchEulerDiscreteScheduler" if isinstance(path, RectifiedFlow) else "DDIMScheduler"
        make_scheduler(kind, path, {}).save_pretrained(out / SCHEDULER)
    if not isinstance(net, DiffusersVae):
        kept = f"stays {spec.codec}" if spec.codec else "are coarse pixels"
        return [f"the autoencoder is none of diffusers' and {kept}; no {VAE} is there"]
    net.std /= spec.scale  # which pipelines know as one number, and so does what reads this back
    shifted = bool(net.mean.any())
    net.leave(out / VAE, dtype)
    if not isinstance(path, VariancePreserving) or shifted:
        why = "its autoencoder shifts latents" if shifted else "it was trained to flow and not to tell noise"
        return [f"{why}, which {moved.pipeline} does not know: load the parts one by one, or generate here"]
    parts = {SCHEDULER: "DDIMScheduler", moved.part: moved.kind, VAE: "AutoencoderKL"}
    index = {"_class_name": moved.pipeline, "_diffusers_version": diffusers.__version__, **moved.index}
    index |= {part: ["diffusers", kind] for part, kind in parts.items()}
    (out / diffusers_pipeline.INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    return []


def write_recipe(directory: Path, moved: DiffusersConversion, out: Path) -> str:
    """The run's, as it reads the folder back."""
    settings = config_to_dict(load_any_config(directory / CONFIG_FILE))
    model = {**settings["model"], **moved.reads, "weights": None}
    model |= {"scale": 1.0} if (out / VAE).is_dir() else {}
    return render_yaml({**settings, "model": model, "tuning": {"type": "full"}})


def model_card(config: RunConfig, moved: DiffusersConversion, out: Path, said: Sequence[str]) -> str:
    """What is there, and how to use it, in Markdown."""
    whole = (out / diffusers_pipeline.INDEX_FILE).is_file()
    load = f'{moved.pipeline}.from_pretrained("path/of/this/folder")'
    if not whole:
        load = f'{moved.kind}.from_pretrained("path/of/this/folder", subfolder="{moved.part}")'
    kind = moved.pipeline if whole else moved.kind
    lines = [f"# {config.name}", "", f"A `{moved.kind}`, trained with tastemaker by the recipe in `{RECIPE_FILE}`.", ""]
    lines += ["```python", f"from diffusers import {kind}", f"model = {load}", "```", ""]
    lines += ["Here: `tastemaker generate path/of/this/folder -p 0`.", *(f"\n{x[0].upper()}{x[1:]}." for x in said)]
    return "\n".join(lines) + "\n"
