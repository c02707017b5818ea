"""Load the weights of teachers, which an objective keeps as snapshots: of runs, checkpoints, files and exports."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from ..core.errors import CheckpointError
from ..core.lora import Lora, LoraWeights
from ..core.objective import WeightSource
from ..core.registry import ConfigError
from ..core.types import Placement
from ..core.weights import Weights
from ..training import checkpoint
from .load import load_any_config
from .schema import RunConfig

CONFIG_FILE = "config.yaml"  # of a run directory


def load_snapshots(weights: Weights, config: RunConfig, exports: Mapping[Path, dict[str, Tensor]]) -> None:
    """Fill the snapshots whose weights come from outside of the run. `exports` are tensors of exported folders."""
    for name, source in config.objective.snapshot_sources().items():
        if not source.path.exists():
            raise ConfigError(
                f"{source.key}: {source.path} does not exist; give a run, a checkpoint, a .safetensors file or an "
                "exported folder [TM1611]"
            )
        tensors = exports.get(source.path) or read_teacher(config, source)
        try:
            checkpoint.load_snapshot(tensors, weights, name, _group(source) if isinstance(tensors, Path) else "weights")
        except CheckpointError as error:
            raise ConfigError(
                f"{source.key}: the teacher needs the architecture of the student, and with LoRA its adapters: {error}"
                " [TM1612]"
            ) from error


def read_teacher(config: RunConfig, source: WeightSource) -> Path | dict[str, Tensor]:
    """Return where the tensors of the student's names are, or the tensors, of adapters merged or scaled as needed."""
    teacher = find_teacher_config(source.path)
    if teacher is None or not (isinstance(config.tuning, Lora) or isinstance(teacher.tuning, Lora)):
        return source.path
    if not isinstance(teacher.tuning, Lora):
        raise ConfigError(
            f"{source.key}: {source.path} trained all weights, which adapters cannot hold; set tuning.type to full or "
            "frozen_copy, or train the teacher with tuning.type=lora [TM1613]"
        )
    if not isinstance(config.tuning, Lora):
        return merge_teacher(teacher, source)
    if teacher.model.weights != config.model.weights:
        raise ConfigError(
            f"{source.key}: the adapters of {source.path} belong to model.weights={teacher.model.weights}, and the "
            f"student has {config.model.weights}; set model.weights to that of the teacher [TM1614]"
        )
    if teacher.tuning.rank != config.tuning.rank:
        raise ConfigError(
            f"{source.key}: the adapters of {source.path} have rank {teacher.tuning.rank}, and tuning.rank is "
            f"{config.tuning.rank}; set tuning.rank={teacher.tuning.rank} [TM1615]"
        )
    return scale_teacher(teacher.tuning, config.tuning, source)


def find_teacher_config(path: Path) -> RunConfig | None:
    """The configuration of the run that a directory or a checkpoint belongs to; None for files and copies."""
    for directory in (path, path.parent.parent):
        if path.is_dir() and (directory / CONFIG_FILE).is_file():
            config = load_any_config(directory / CONFIG_FILE)
            return config if isinstance(config, RunConfig) else None
    return None


@torch.no_grad()
def merge_teacher(teacher: RunConfig, source: WeightSource) -> dict[str, Tensor]:
    """The network of a run that trained adapters, with these merged, by the names of the network."""
    model = teacher.model.load(Placement())
    weights = teacher.tuning.apply(model, ())
    checkpoint.initialize_weights(source.path, weights, _group(source))
    assert isinstance(weights, LoraWeights)
    return {key: x.detach().clone() for key, x in weights.merged().items()}


def scale_teacher(tuning: Lora, student: Lora, source: WeightSource) -> Path | dict[str, Tensor]:
    """The adapters of a teacher, in the scale alpha / rank of the student."""
    alphas = [2 * each.rank if each.alpha is None else each.alpha for each in (tuning, student)]
    if alphas[0] == alphas[1]:
        return source.path
    reader = checkpoint.open_source(source.path, _group(source))
    tensors = {key: reader.read(key, 0, shape[0] if shape else 1) for key, shape in reader.shapes.items()}
    ratio = alphas[0] / alphas[1]
    return {key: x * ratio if "lora_B" in key or "lora_embedding_B" in key else x for key, x in tensors.items()}


def _group(source: WeightSource) -> str:
    return "snapshots/ema" if source.ema else "weights"
