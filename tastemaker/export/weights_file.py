"""`tastemaker export`: the weights of a run in one file, with what they belong to."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

from ..config.build import build, build_autoencoder
from ..config.dump import config_to_dict
from ..config.load import load_any_config
from ..config.schema import AutoencoderRunConfig, JudgeRunConfig, RunConfig
from ..core.lora import LoraWeights
from ..core.registry import ConfigError
from ..core.weights import Weights
from ..models import weight_files
from ..models.int8_quantization import quantize_int8
from ..models.showo.model import Showo
from ..training import checkpoint
from ..training.resume import CONFIG_FILE
from .judge import check_new_directory, export_judge, write_showo

DEVICE = "engine.device=cpu"  # nothing is computed


def export_weights(directory: Path, out: Path, name: str, bits: int, console: Console) -> None:
    """Write the averaged weights, or those asked for, in so many bits each."""
    changes = [DEVICE, "engine.compile=false", "engine.strategy=replicated"]
    config = load_any_config(directory / CONFIG_FILE, changes) if (directory / CONFIG_FILE).is_file() else None
    if isinstance(config, JudgeRunConfig):
        export_judge(directory, out, name, console)
        return
    if bits not in (8, 16, 32):
        raise ConfigError(f"--bits: found {bits}; expected 8, 16 or 32")
    painter = config.model if isinstance(config, RunConfig) and isinstance(config.model, Showo) else None
    if painter is not None and not out.suffix:
        check_new_directory(out, "Show-o as published")
    elif out.suffix != ".safetensors":
        raise ConfigError(f"--out: '{out}' would be a safetensors file; let its name end in .safetensors")
    found = checkpoint.latest(directory)
    if config is None or found is None:
        raise ConfigError(f"{directory} has no checkpoint to export; give the directory of a run")
    tensors, chosen = choose_weights(load_weights(config, directory, found), name)
    if painter is not None and not out.suffix:
        write_showo(painter, tensors, out)
        console.print(f"{out}: {chosen} weights of {found.name}, as Show-o's are published", highlight=False)
        return
    weight_files.write_weights(
        out,
        quantize_int8(tensors) if bits == 8 else tensors,
        weights_metadata(config, found),
        torch.float32 if bits == 32 else torch.float16,
    )
    size = out.stat().st_size / 1e6
    console.print(f"{out}: {chosen} weights of {found.name}, {size:.1f} MB", highlight=False)


def choose_weights(weights: Weights, name: str) -> tuple[Mapping[str, Tensor], str]:
    """The averaged weights, or those asked for, and what they are called."""
    kept = weights.stored()
    chosen = name or ("ema" if "ema" in kept else "live")
    if chosen != "live" and chosen not in kept:
        raise ConfigError(f"--weights: the run keeps no '{chosen}' (there are: {', '.join(['live', *kept])})")
    if isinstance(weights, LoraWeights):
        return weights.merged(chosen), chosen  # for that is what `weights:` loads
    return dict(weights.net.state_dict()) | (kept[chosen] if chosen != "live" else {}), chosen


def load_weights(config: RunConfig | AutoencoderRunConfig, directory: Path, found: Path) -> Weights:
    """The weights of a checkpoint in their network."""
    if isinstance(config, AutoencoderRunConfig):
        autoencoder = build_autoencoder(config, directory)
        autoencoder.resume(found)
        return autoencoder.weights
    run = build(config, directory, fed=False)
    run.resume(found)
    return run.policy.weights


def weights_metadata(config: RunConfig | AutoencoderRunConfig, found: Path) -> dict[str, Any]:
    """What says how to use the weights, and where they come from."""
    settings = config_to_dict(config)
    kept = ("autoencoder",) if isinstance(config, AutoencoderRunConfig) else ("model", "process", "guidance")
    return {**{key: settings[key] for key in kept}, "trained": {"name": config.name, "step": found.name}}
