"""`tastemaker export --layout` of an autoencoder: what diffusers or its authors' own programs load."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
from rich.console import Console
from torch import nn

from ..config.load import load_any_config
from ..config.schema import AutoencoderRunConfig
from ..core.autoencoder import SupportsExport
from ..core.registry import ConfigError
from ..core.types import Placement
from ..models.autoencoder_loading import load_autoencoder
from ..training import checkpoint
from ..training.resume import CONFIG_FILE
from .weights_file import DEVICE, choose_weights, load_weights


def is_autoencoder_run(directory: Path) -> bool:
    """Whether a directory is of a run that trained an autoencoder."""
    file = directory / CONFIG_FILE
    return file.is_file() and isinstance(load_any_config(file), AutoencoderRunConfig)


def export_autoencoder(
    directory: Path, out: Path, layout: str, name: str, dtype: torch.dtype, console: Console
) -> None:
    """Write the averaged weights, or those asked for, as others read them."""
    config, step = (
        load_any_config(directory / CONFIG_FILE, [DEVICE, "engine.strategy=replicated"]),
        checkpoint.latest(directory),
    )
    if step is None or not isinstance(config, AutoencoderRunConfig):
        raise ConfigError(f"{directory} has no checkpoint to export; give the directory of a run")
    if out.exists():
        raise ConfigError(f"--out: {out} is there already; name another, or remove it")
    net, chosen = load_trained_autoencoder(config, directory, step, name)
    if not isinstance(net, SupportsExport) or net.layout != layout:
        way = f"give {net.layout}" if isinstance(net, SupportsExport) else "leave --layout out to keep it for use here"
        raise ConfigError(f"--layout: {layout} does not know {type(config.autoencoder).__name__}; {way}")
    partial = out.with_name(f".{out.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    out.parent.mkdir(parents=True, exist_ok=True)
    net.leave(partial, dtype)
    partial.replace(out)
    console.print(f"{out}: {chosen} weights of {step.name}", highlight=False)


def load_trained_autoencoder(
    config: AutoencoderRunConfig, directory: Path, step: Path, name: str
) -> tuple[nn.Module, str]:
    """The network with the weights asked for, and what they are called."""
    if not name and (step / "weights.safetensors").is_file():  # neither data nor losses are needed
        return load_autoencoder(str(directory), Placement()), "ema" if (
            step / "snapshots/ema.safetensors"
        ).is_file() else "live"
    weights = load_weights(config, directory, step)
    tensors, chosen = choose_weights(weights, name)
    weights.net.load_state_dict(dict(tensors))
    return weights.net, chosen
