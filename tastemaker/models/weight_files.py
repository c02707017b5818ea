"""Weights with the configuration they belong to, in one safetensors file."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import yaml
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from ..core.registry import ConfigError
from .int8_quantization import dequantize_int8

PACKAGE_ROOT = Path(__file__).parent.parent
STEP_FOLDER = re.compile(r"step-(\d+)")
Tensors = dict[str, Tensor]


def read_weights(name: str | Path) -> tuple[Tensors, dict[str, Any]]:
    """Tensors, floats as float32 even if packed, and their configuration: of a file, of a run, or from the package.

    A run's directory means its newest checkpoint, averaged weights before live ones; "playground/flow" means the file
    in the package.
    """
    path = Path(name)
    if path.is_dir():
        return _run(path)
    if not path.is_file():
        path = shipped_weights_path(str(name))
    tensors, metadata = _open(path)
    try:
        return tensors, json.loads(metadata.get("config", "{}"))
    except ValueError as error:
        raise ConfigError(f"{path}: its configuration is no JSON ({error}); write the file anew") from error


def shipped_weights_path(name: str) -> Path:
    """The file in the package that a name such as "playground/flow" means."""
    home, _, short = name.rpartition("/")
    path = PACKAGE_ROOT / home / "weights" / f"{short}.safetensors"
    if not home or not path.is_file():
        known = sorted(f"{p.parent.parent.name}/{p.stem}" for p in PACKAGE_ROOT.glob("*/weights/*.safetensors"))
        there = f"the package ships {', '.join(known)}" if known else "the package ships none"
        raise ConfigError(
            f"there are no weights '{name:.200}'; expected a file, the directory of a run, or a name: {there}"
        )
    return path


def write_weights(
    path: Path, tensors: Mapping[str, Tensor], config: Mapping[str, Any], dtype: torch.dtype = torch.float16
) -> None:
    """Write floats as `dtype` and everything else as it is; the file appears whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.partial")
    kept = {key: (x.to(dtype) if x.is_floating_point() else x).detach().cpu() for key, x in tensors.items()}
    save_file({key: x.contiguous().clone() for key, x in kept.items()}, partial, {"config": json.dumps(config)})
    partial.replace(path)


def _open(path: Path) -> tuple[Tensors, dict[str, str]]:
    try:
        with safe_open(path, framework="pt") as file:
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118  # no dictionary
            metadata: dict[str, str] = file.metadata() or {}
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"{path} is not a readable safetensors file ({error}); download or write it again") from error
    return {key: x.float() if x.is_floating_point() else x for key, x in dequantize_int8(tensors).items()}, metadata


def _run(directory: Path) -> tuple[Tensors, dict[str, Any]]:
    """The newest checkpoint of a run, and the configuration beside it."""
    found = [(int(match[1]), path) for path in directory.glob("checkpoints/step-*") if (match := _step(path))]
    if not found:
        raise ConfigError(f"{directory} has no checkpoint yet; train it first, or name other weights")
    newest = max(found)[1]
    averaged, live, buffers = (
        newest / f"{group}.safetensors" for group in ("snapshots/ema", "weights", "snapshots/buffers")
    )
    chosen = averaged if averaged.is_file() else live
    if not chosen.is_file():
        raise ConfigError(f"{newest} is a checkpoint in shards; export the run to one file (`tastemaker export`) first")
    tensors, _ = _open(chosen)
    if buffers.is_file():
        tensors |= _open(buffers)[0]
    return tensors, yaml.safe_load((directory / "config.yaml").read_text(encoding="utf-8"))


def _step(path: Path) -> re.Match[str] | None:
    return STEP_FOLDER.fullmatch(path.name)
