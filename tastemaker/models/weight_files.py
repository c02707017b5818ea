"""Our own weight files: tensors with the configuration they belong to, in one safetensors file, optionally in int8."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from ..core.checkpoint_files import explain_damage, latest_checkpoint, read_manifest, verify_files
from ..core.errors import CheckpointError, DamagedCheckpointError
from ..core.output_paths import replace_file
from ..core.registry import ConfigError
from ..core.safe_files import parse_json, read_yaml_mapping

PACKAGE_ROOT = Path(__file__).parent.parent
PLAYGROUND = "playground"
Tensors = dict[str, Tensor]
SCALE_SUFFIX = ".scale"  # of the int8 scales, after the name of their tensor
INT8_MAX = 127
MIN_INT8_ELEMENTS = 4096  # smaller tensors are not quantized
MIN_SCALE = 2.0**-14  # the smallest normal number in half precision


def read_weights(name: str | Path) -> tuple[Tensors, dict[str, Any]]:
    """Tensors (floats as float32, dequantized) and configuration of a file, a run, or a name in the package.

    Of a run's directory the newest checkpoint is read, EMA weights if there are any; "playground/flow" is the file
    of that name in the package.
    """
    path = Path(name)
    if path.is_dir():
        return _read_run(path)
    if not path.is_file():
        path = shipped_weights_path(str(name))
    tensors, metadata = _read_file(path)
    config = parse_json(metadata.get("config", "{}"), f"{path}, the configuration in its metadata")
    if not isinstance(config, dict):
        raise ConfigError(
            f"{path}: the configuration in this file is a {type(config).__name__}; write the file again [TM545]"
        )
    return tensors, config


def is_shipped(name: str) -> bool:
    """Whether the package ships weights of this name."""
    home, _, short = name.rpartition("/")
    return bool(home) and (PACKAGE_ROOT / home / "weights" / f"{short}.safetensors").is_file()


def shipped_weights_path(name: str) -> Path:
    """The file in the package for a name such as "playground/flow"."""
    if not is_shipped(name):
        known = sorted(f"{p.parent.parent.name}/{p.stem}" for p in PACKAGE_ROOT.glob("*/weights/*.safetensors"))
        message = f"the weights '{name:.200}' were not found; give a file, a run directory, or a name"
        if name.rpartition("/")[0] == PLAYGROUND:
            folder = f"tastemaker/{PLAYGROUND}/weights"
            message += (
                "; an installed wheel contains only the playground weights for `tastemaker demo`; for the others, "
                f"clone the repository, or copy its folder {folder} to {PACKAGE_ROOT / PLAYGROUND / 'weights'}"
            )
        raise ConfigError(f"{message}; this installation has {', '.join(known) or 'none'} [TM546]")
    home, _, short = name.rpartition("/")
    return PACKAGE_ROOT / home / "weights" / f"{short}.safetensors"


def write_weights(
    path: Path,
    tensors: Mapping[str, Tensor],
    config: Mapping[str, Any],
    dtype: torch.dtype = torch.float16,
    metadata: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """Write floats as `dtype` and other tensors as they are; the file is replaced atomically."""
    converted = {key: (x.to(dtype) if x.is_floating_point() else x).detach().cpu() for key, x in tensors.items()}
    contiguous = {key: x.contiguous().clone() for key, x in converted.items()}
    with replace_file(path) as partial:
        save_file(contiguous, partial, {"config": json.dumps(config), **metadata})


def _read_file(path: Path) -> tuple[Tensors, dict[str, str]]:
    try:
        with safe_open(path, framework="pt") as file:
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118  # no dictionary
            metadata: dict[str, str] = file.metadata() or {}
    except (OSError, SafetensorError) as error:
        raise ConfigError(
            f"{path} is not a readable safetensors file ({error}); download the file or write it again [TM547]"
        ) from error
    return {key: x.float() if x.is_floating_point() else x for key, x in dequantize_int8(tensors).items()}, metadata


def _read_run(directory: Path) -> tuple[Tensors, dict[str, Any]]:
    """The newest checkpoint of a run, and the configuration of the run."""
    newest = latest_checkpoint(directory)
    if newest is None:
        raise ConfigError(f"{directory} has no checkpoint yet; train this run first, or use other weights [TM548]")
    try:
        manifest = read_manifest(newest)
        ema, live, buffers = (f"{group}.safetensors" for group in ("snapshots/ema", "weights", "snapshots/buffers"))
        if live not in manifest.files:
            raise ConfigError(
                f"{newest} is a sharded checkpoint; export the run to one file first, with `tastemaker export` [TM549]"
            )
        files = [ema if ema in manifest.files else live, *([buffers] if buffers in manifest.files else [])]
        verify_files(newest, manifest, files)
    except DamagedCheckpointError as error:
        raise CheckpointError(explain_damage(error, newest)) from error
    tensors = {key: x for file in files for key, x in _read_file(newest / file)[0].items()}
    return tensors, read_yaml_mapping(directory / "config.yaml")


def quantize_int8(tensors: Mapping[str, Tensor]) -> Tensors:
    """Large matrices as int8 with a half-precision scale per row; other tensors as they are."""
    quantized: Tensors = {}
    for key, x in tensors.items():
        if not x.is_floating_point() or x.ndim < 2 or x.numel() < MIN_INT8_ELEMENTS:
            quantized[key] = x
            continue
        # The scale is rounded to half precision first, because that is the scale of dequantization.
        scale = (x.detach().float().flatten(1).abs().amax(1) / INT8_MAX).clamp(min=MIN_SCALE).half()
        rounded = (x.detach().float() / _per_row(scale, x)).round().clamp(-INT8_MAX, INT8_MAX)
        quantized[key], quantized[key + SCALE_SUFFIX] = rounded.to(torch.int8), scale
    return quantized


def dequantize_int8(tensors: Mapping[str, Tensor]) -> Tensors:
    """The inverse of `quantize_int8`, as float32; tensors without a scale stay as they are."""
    scales = {key for key in tensors if key.endswith(SCALE_SUFFIX) and key.removesuffix(SCALE_SUFFIX) in tensors}
    return {
        key: x.float() * _per_row(tensors[key + SCALE_SUFFIX], x) if key + SCALE_SUFFIX in scales else x
        for key, x in tensors.items()
        if key not in scales
    }


def _per_row(scale: Tensor, x: Tensor) -> Tensor:
    return scale.float().view(-1, *[1] * (x.ndim - 1))
