"""To and from LlamaGen's own trainers: `export --layout llamagen` and `train --resume` of their folders."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console

from ..config.load import load_any_config
from ..config.schema import AutoencoderRunConfig, RunConfig
from ..core.lora import LoraWeights
from ..core.registry import ConfigError
from ..core.types import Placement
from ..models import loading
from ..models.llamagen import optimizer_state
from ..models.llamagen.model import Llamagen
from ..models.vq import Vq
from ..training import checkpoint, run_directory
from ..training.initialization import initialize_from_trainer
from ..training.resume import CONFIG_FILE
from ..training.run import Run
from ..training.safetensors_io import ShardedTensorReader
from .llamagen_checkpoint import AdamWCheckpointState, write_llamagen_checkpoint
from .weights_file import choose_weights, load_weights

RING = 65536  # uses of codes that the published tokenizer counts, and looks for in files
GROUPS = 32  # in which it normalises channels


@dataclass(frozen=True)
class LlamagenExport:
    """What to write, and how."""

    directory: Path
    out: Path  # in which the folder of the step is made
    weights: str = ""  # the average if there is one
    dtype: torch.dtype = torch.float32
    ranks: int = 0  # whole if 0


def export_llamagen(order: LlamagenExport, console: Console) -> None:
    """Write a run's last checkpoint as those trainers do."""
    step = checkpoint.latest(order.directory)
    if not (order.directory / CONFIG_FILE).is_file() or step is None:
        raise ConfigError(f"{order.directory} has no checkpoint to export; give the directory of a run")
    config = load_any_config(order.directory / CONFIG_FILE)
    if isinstance(config, AutoencoderRunConfig):
        export_llamagen_tokenizer(order, config, step, console)
        return
    if not isinstance(config, RunConfig) or not isinstance(config.model, Llamagen):
        raise ConfigError("--layout llamagen: the run trained another model; leave it out, or export one of llamagen")
    done = run_directory.read_state(step).step
    target = order.out / f"{done:07d}"
    if target.exists():
        raise ConfigError(f"--out: {target} is there already; name another folder, or remove it")
    partial = target.with_name(f".{target.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    _write(order, config, config.model, step, partial)
    partial.replace(target)
    form = f"in {order.ranks} shards" if order.ranks else "whole"
    console.print(f"{target}: weights of {step.name}, {form}", highlight=False)


def export_llamagen_tokenizer(
    order: LlamagenExport, config: AutoencoderRunConfig, step: Path, console: Console
) -> None:
    """Write a tokenizer as LlamaGen publishes them: a `.pt` that holds {"model": tensors}."""
    spec = config.autoencoder
    if not isinstance(spec, Vq) or spec.quantizer != "codebook" or spec.groups != GROUPS:
        found = f"'{spec.quantizer}' in groups of {spec.groups}" if isinstance(spec, Vq) else type(spec).__name__
        raise ConfigError(
            f"--layout llamagen: found {found}; its tokenizers have a codebook and normalise {GROUPS} groups of "
            "channels, as recipe llamagen-vq has; leave --layout out to keep it for use here"
        )
    if order.out.suffix != ".pt":
        raise ConfigError(f"--out: '{order.out}' would be a file of torch; let its name end in .pt")
    tensors, name = choose_weights(load_weights(config, order.directory, step), order.weights)
    kept = {key: x.detach().to(order.dtype, copy=True).cpu() for key, x in tensors.items()}
    order.out.parent.mkdir(parents=True, exist_ok=True)
    partial = order.out.with_name(f".{order.out.name}.partial")
    torch.save({"model": {**kept, "quantize.codebook_used": torch.zeros(RING)}}, partial)
    partial.replace(order.out)
    console.print(f"{order.out}: {name} weights of {step.name}", highlight=False)


def _write(order: LlamagenExport, config: RunConfig, spec: Llamagen, step: Path, out: Path) -> None:
    model = spec.load(Placement(dtype=torch.float32))
    names = tuple(name for name, _ in model.net.named_parameters())
    weights = config.tuning.apply(model, ())
    kept = sorted(path.name.removesuffix(".safetensors") for path in step.glob("snapshots/*"))
    name = order.weights or ("ema" if "ema" in kept else "live")
    if name != "live" and name not in kept:
        raise ConfigError(f"--weights: the run keeps no '{name}' (there are: {', '.join(['live', *kept])})")
    checkpoint.initialize_weights(step, weights, "weights" if name == "live" else f"snapshots/{name}")
    adapted = isinstance(weights, LoraWeights)
    own = weights.merged() if isinstance(weights, LoraWeights) else model.net.state_dict()
    tensors = {key: x.detach().to(order.dtype) for key, x in own.items()}
    state = run_directory.read_state(step)
    done = state.step
    memory = None
    if not adapted and config.optim.moments == "fp32":
        found = ShardedTensorReader(run_directory.group_files(step, state, "optimizer"))
        memory = AdamWCheckpointState(
            {key: found.read(key, 0, shape[0] if shape else 1) for key, shape in found.shapes.items()},
            config.optim,
            names,
        )
    write_llamagen_checkpoint(out, tensors, memory, done, order.ranks)


def resume_from_llamagen(run: Run, folder: Path) -> None:
    """Go on from a checkpoint of those trainers: its weights, moments and step."""
    shapes = {name: tuple(p.shape) for name, p in run.policy.weights.trainable().items()}
    tensors = loading.read_checkpoint(str(folder))
    initialize_from_trainer(
        run,
        tensors,
        optimizer_state.read_optimizer_state(folder, shapes),
        optimizer_state.read_step(folder),
        str(folder),
    )
