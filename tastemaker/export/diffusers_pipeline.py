"""Pipeline folders of diffusers: a trained component with copies of the others, or a class-conditional DiT."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import torch
from rich.console import Console
from torch import Tensor

from ..config.dump import config_to_dict
from ..config.load import load_any_config
from ..config.schema import RunConfig
from ..config.yaml_io import render_yaml
from ..core.model_spec import DiffusersConversion, PipelineLayout
from ..core.output_paths import replace_directory, replace_file
from ..core.registry import ConfigError
from ..core.safe_files import read_json
from ..core.types import Placement
from ..models.pretrained import select_needed_files
from ..models.pretrained_autoencoder import load_autoencoder
from ..processes.gaussian import GaussianProcess
from ..processes.paths import RectifiedFlow, VariancePreserving
from ..search.diffusers_scheduler import make_scheduler
from ..training import checkpoint
from ..training.run_directory import CONFIG_FILE, RECIPE_FILE
from .model_card import FOLDER_PLACEHOLDER
from .modelspec import make_metadata, save_shards
from .publishable import publishable_config
from .weights import CPU_OVERRIDES, choose_weights, load_weights

INDEX_FILE = "model_index.json"
WEIGHTS_PATTERN = "diffusion_pytorch_model{suffix}.safetensors"
MAX_SHARD_SIZE = "5GB"
VAE, SCHEDULER = "vae", "scheduler"


@dataclass(frozen=True)
class GeneratorExport:
    """What to export, and how."""

    run_dir: Path
    out: Path
    layout: Literal["diffusers", "comfyui", "authors", "transformers"]
    weights: str = ""  # ema if the run has it, otherwise live
    dtype: torch.dtype = torch.bfloat16
    merge: bool = False  # merge LoRA adapters into the weights
    network_only: bool = False  # leave out components that were not trained
    max_shard_size: str = MAX_SHARD_SIZE
    publishable: bool = False  # leave out secrets and paths of this machine


def save_component(
    net: Any,
    tensors: Mapping[str, Tensor],
    folder: Path,
    max_shard_size: str = MAX_SHARD_SIZE,
    metadata: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """Save a diffusers network: its config, and its tensors in one file or in shards with an index."""
    folder.mkdir(parents=True)
    config = {key: value for key, value in json.loads(net.to_json_string()).items() if key != "_name_or_path"}
    (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    save_shards(tensors, folder, WEIGHTS_PATTERN, max_shard_size, metadata)


def copy_other_components(base: Path, layout: PipelineLayout, folder: Path) -> None:
    """Copy the components of a pipeline that were not trained, and its index."""
    try:
        index = read_json(base / INDEX_FILE)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{base} does not have a readable {INDEX_FILE}, so the other components of the pipeline are unknown; "
            "add --network-only to export the network without them [TM662]"
        ) from error
    components = [name for name, entry in index.items() if isinstance(entry, list) and name not in layout.components]
    for component in components:
        if (base / component).is_dir():
            _copy_needed_files(base / component, folder / component)
        else:
            index[component] = [None, None]  # such as a safety checker that was not downloaded
    (folder / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _copy_needed_files(source: Path, target: Path) -> None:
    names = [str(path.relative_to(source)) for path in source.rglob("*") if path.is_file()]
    for name in select_needed_files(names):
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source / name, target / name)  # resolves the links of the hub's cache


# DiTs trained from scratch, for which diffusers has a network


def is_dit_run(run_dir: Path) -> bool:
    """Whether a directory is that of a run whose network can be converted to one of diffusers."""
    file = run_dir / CONFIG_FILE
    config = load_any_config(file) if file.is_file() else None
    return isinstance(config, RunConfig) and config.model.converts_to_diffusers


def load_dit(options: GeneratorExport) -> tuple[RunConfig, Path, Mapping[str, Tensor], str]:
    """Return configuration and checkpoint of a run, its tensors with adapters merged, and their snapshot's name."""
    if options.layout not in ("diffusers", "authors"):
        raise ConfigError(
            f"--layout: {options.layout} does not support this model; use --layout diffusers, or remove --layout "
            "[TM663]"
        )
    config = load_any_config(options.run_dir / CONFIG_FILE, CPU_OVERRIDES)
    step_dir = checkpoint.latest_checkpoint(options.run_dir)
    if step_dir is None or not isinstance(config, RunConfig) or not config.model.converts_to_diffusers:
        raise ConfigError(
            f"{options.run_dir} has no checkpoint to export; give a run directory with a checkpoint [TM664]"
        )
    return config, step_dir, *choose_weights(load_weights(config, options.run_dir, step_dir), options.weights)


def export_dit_file(options: GeneratorExport, console: Console) -> None:
    """Write the weights as the trainer of the network's authors does: one `.pth` file, LoRA adapters merged."""
    if options.out.suffix not in (".pth", ".pt"):
        raise ConfigError(
            f"--out: '{options.out}' is written as its authors' trainer does; let its name end in .pth [TM854]"
        )
    config, step_dir, tensors, chosen = load_dit(options)
    renamed = config.model.to_authors({key: x.detach().to(options.dtype) for key, x in tensors.items()})
    with replace_file(options.out) as partial:
        torch.save({key: x.clone() for key, x in renamed.items()}, partial)
    console.print(f"{options.out}: {chosen} weights of {step_dir.name}", highlight=False, soft_wrap=True)


def export_dit_pipeline(options: GeneratorExport, console: Console) -> None:
    """Write a pipeline folder atomically, LoRA adapters merged, and print what diffusers computes differently."""
    import diffusers

    config, step_dir, tensors, chosen = load_dit(options)
    conversion = config.model.to_diffusers({key: x.detach().to(options.dtype) for key, x in tensors.items()})
    with torch.device("meta"):
        net = getattr(diffusers, conversion.model_class)(**conversion.config)
    with replace_directory(options.out) as partial:
        metadata = make_metadata(config, "diffusers", is_lora=False)
        save_component(net, conversion.tensors, partial / conversion.component, options.max_shard_size, metadata)
        notes = [] if options.network_only else write_pipeline_components(config, conversion, partial, options.dtype)
        notes += [conversion.differences] if conversion.differences else []
        recipe = render_recipe(options.run_dir, conversion, partial)
        (partial / RECIPE_FILE).write_text(
            publishable_config(recipe) if options.publishable else recipe, encoding="utf-8"
        )
        (partial / "README.md").write_text(render_dit_card(config, conversion, partial, notes), encoding="utf-8")
    console.print(f"{options.out}: {chosen} weights of {step_dir.name}", highlight=False, soft_wrap=True)
    for note in notes:
        console.print(note, markup=False, highlight=False, soft_wrap=True)


def write_pipeline_components(
    config: RunConfig, conversion: DiffusersConversion, out: Path, dtype: torch.dtype
) -> list[str]:
    """Write scheduler, autoencoder and index as far as diffusers supports them. Returns notes about the rest."""
    import diffusers

    from ..models.autoencoder_kl import DiffusersVae

    net = load_autoencoder(conversion.autoencoder, Placement()) if conversion.autoencoder else None
    process = config.process
    path = process.path if isinstance(process, GaussianProcess) else None
    if isinstance(path, RectifiedFlow | VariancePreserving):
        scheduler = "FlowMatchEulerDiscreteScheduler" if isinstance(path, RectifiedFlow) else "DDIMScheduler"
        make_scheduler(scheduler, path, {}).save_pretrained(out / SCHEDULER)
    if not isinstance(net, DiffusersVae):
        codec = f"autoencoder {conversion.autoencoder}" if conversion.autoencoder else "downsampled pixel space"
        return [f"diffusers does not support the {codec}, so the folder {VAE} was not written"]
    net.std /= conversion.scaling_factor  # pipelines and the exported recipe have both factors as one number
    shifts_latents = bool(net.mean.any())
    net.export(out / VAE, dtype)
    if not isinstance(path, VariancePreserving) or shifts_latents:
        reason = "the autoencoder shifts latents" if shifts_latents else "the network predicts a flow, not noise"
        pipeline = conversion.pipeline_class
        return [f"{reason}, which {pipeline} does not support: load the components one by one, or use tastemaker"]
    classes = {SCHEDULER: "DDIMScheduler", conversion.component: conversion.model_class, VAE: "AutoencoderKL"}
    index = {
        "_class_name": conversion.pipeline_class,
        "_diffusers_version": diffusers.__version__,
        **conversion.model_index,
        **{component: ["diffusers", name] for component, name in classes.items()},
    }
    (out / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    return []


def render_recipe(run_dir: Path, conversion: DiffusersConversion, out: Path) -> str:
    """Return the run's recipe, changed so that it loads the exported folder."""
    settings = config_to_dict(load_any_config(run_dir / CONFIG_FILE))
    model = {**settings["model"], **conversion.spec_fields, "weights": None}
    model |= {"scaling_factor": 1.0} if (out / VAE).is_dir() else {}
    return render_yaml({**settings, "model": model, "tuning": {"type": "full"}})


def render_dit_card(config: RunConfig, conversion: DiffusersConversion, out: Path, notes: Sequence[str]) -> str:
    """Return a README that says what the folder holds and how to load it."""
    if (out / INDEX_FILE).is_file():
        class_name = conversion.pipeline_class
        load = f'{class_name}.from_pretrained("{FOLDER_PLACEHOLDER}")'
    else:
        class_name = conversion.model_class
        load = f'{class_name}.from_pretrained("{FOLDER_PLACEHOLDER}", subfolder="{conversion.component}")'
    lines = [
        f"# {config.name}",
        "",
        f"A `{conversion.model_class}`, trained with tastemaker by the recipe in `{RECIPE_FILE}`.",
        "",
        "```python",
        f"from diffusers import {class_name}",
        f"model = {load}",
        "```",
        "",
        f"With tastemaker: `tastemaker generate {FOLDER_PLACEHOLDER} -p 0`.",
        *(f"\n{note[0].upper()}{note[1:]}." for note in notes),
    ]
    return "\n".join(lines) + "\n"
