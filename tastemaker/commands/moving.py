"""`tastemaker export --layout diffusers` of a generator made here whose network diffusers has: a DiT of classes."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console

from ..config.dump import resolve
from ..config.load import load_any
from ..config.run import RunConfig
from ..config.text import render
from ..export import folder
from ..models.layouts import Moved, Moving
from ..models.opening import opened
from ..processes.gaussian import GaussianProcess
from ..processes.paths import Straight, VariancePreserving
from ..registry import ConfigError
from ..search.scheduled import scheduler
from ..train import checkpoint
from ..types import Placement
from .directory import CONFIG, RECIPE
from .exporting import DEVICE, averaged, loaded

VAE, SCHEDULER = "vae", "scheduler"


@dataclass(frozen=True)
class Move:
    """Which run to write where, and how."""

    directory: Path
    out: Path
    weights: str = ""  # the average if there is one
    dtype: torch.dtype = torch.bfloat16
    bare: bool = False  # the network alone
    shard: str = folder.SHARD


def recognised(directory: Path) -> bool:
    """Whether a directory is of a run of such a generator."""
    file = directory / CONFIG
    config = load_any(file) if file.is_file() else None
    return isinstance(config, RunConfig) and isinstance(config.model, Moving)


def move(order: Move, console: Console) -> None:
    """Write the folder, whole or not at all, and say what is to be known of it."""
    import diffusers

    changes = [DEVICE, "engine.compile=false", "engine.strategy=replicated"]
    config, step = load_any(order.directory / CONFIG, changes), checkpoint.latest(order.directory)
    if step is None or not isinstance(config, RunConfig) or not isinstance(config.model, Moving):
        raise ConfigError(f"{order.directory} has no checkpoint to export; give the directory of a run")
    tensors, chosen = averaged(loaded(config, order.directory, step), order.weights)
    moved = config.model.moved({key: x.detach().to(order.dtype) for key, x in tensors.items()})
    partial = order.out.with_name(f".{order.out.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    with torch.device("meta"):
        net = getattr(diffusers, moved.kind)(**moved.settings)
    folder.write_part(net, moved.tensors, partial / moved.part, order.shard)
    said = [] if order.bare else beside(config, config.model, moved, partial, order.dtype)
    said += [moved.differs] if moved.differs else []
    (partial / RECIPE).write_text(recipe(order.directory, moved, partial), encoding="utf-8")
    (partial / "README.md").write_text(page(config, moved, partial, said), encoding="utf-8")
    partial.replace(order.out)
    console.print(f"{order.out}: {chosen} weights of {step.name}", highlight=False, soft_wrap=True)
    for sentence in said:
        console.print(sentence, markup=False, highlight=False, soft_wrap=True)


def beside(config: RunConfig, spec: Moving, moved: Moved, out: Path, dtype: torch.dtype) -> list[str]:
    """What a pipeline has beside its network, as far as diffusers knows it; sentences about what it does not."""
    import diffusers

    from ..models.autoencoder_kl import KlNet

    net = opened(spec.codec, Placement()) if spec.codec else None
    process = config.process
    path = process.path if isinstance(process, GaussianProcess) else None
    if isinstance(path, Straight | VariancePreserving):
        kind = "FlowMatchEulerDiscreteScheduler" if isinstance(path, Straight) else "DDIMScheduler"
        scheduler(kind, path, {}).save_pretrained(out / SCHEDULER)
    if not isinstance(net, KlNet):
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
    (out / folder.INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    return []


def recipe(directory: Path, moved: Moved, out: Path) -> str:
    """The run's, as it reads the folder back."""
    settings = resolve(load_any(directory / CONFIG))
    model = {**settings["model"], **moved.reads, "weights": None}
    model |= {"scale": 1.0} if (out / VAE).is_dir() else {}
    return render({**settings, "model": model, "tuning": {"type": "full"}})


def page(config: RunConfig, moved: Moved, out: Path, said: Sequence[str]) -> str:
    """What is there, and how to use it, in Markdown."""
    whole = (out / folder.INDEX).is_file()
    load = f'{moved.pipeline}.from_pretrained("path/of/this/folder")'
    if not whole:
        load = f'{moved.kind}.from_pretrained("path/of/this/folder", subfolder="{moved.part}")'
    kind = moved.pipeline if whole else moved.kind
    lines = [f"# {config.name}", "", f"A `{moved.kind}`, trained with tastemaker by the recipe in `{RECIPE}`.", ""]
    lines += ["```python", f"from diffusers import {kind}", f"model = {load}", "```", ""]
    lines += ["Here: `tastemaker generate path/of/this/folder -p 0`.", *(f"\n{x[0].upper()}{x[1:]}." for x in said)]
    return "\n".join(lines) + "\n"
