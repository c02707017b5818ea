"""Checkpoints of LlamaGen's own trainers: `export --layout llamagen` writes them, `train --resume` reads them."""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from rich.console import Console
from torch import Tensor
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed._shard.sharded_tensor.metadata import ShardedTensorMetadata, TensorProperties
from torch.distributed._shard.sharded_tensor.shard import Shard
from torch.distributed._shard.sharding_spec import ChunkShardingSpec

from ..config.load import load_any_config
from ..config.schema import AutoencoderRunConfig, OptimConfig, RunConfig
from ..core.lora import LoraWeights
from ..core.output_paths import replace_directory, replace_file
from ..core.registry import ConfigError
from ..core.types import Placement
from ..models import loading
from ..models.image_tokenizer import VqSpec
from ..models.llamagen import optimizer_state
from ..models.llamagen.model import LlamagenSpec
from ..models.llamagen.optimizer_state import fsdp_flat_ranges, optimizer_parameter_order
from ..models.loading import CONSOLIDATED_FILE, STATE_TYPE_FILE, STEP_FILE
from ..training import checkpoint
from ..training.run import Run, initialize_from_trainer
from ..training.run_directory import CONFIG_FILE
from .weights import choose_checkpoint_snapshot, choose_weights, load_weights

CODEBOOK_USED_SIZE = 65536  # of the usage counter in published tokenizer files, which their loader expects
NORM_GROUPS = 32  # groups of the published tokenizer's normalization
Tensors = Mapping[str, Tensor]


@dataclass(frozen=True)
class LlamagenExport:
    """What to export, and how."""

    run_dir: Path
    out: Path  # the folder of the step is created in it
    weights: str = ""  # ema if the run has it, otherwise live
    dtype: torch.dtype = torch.float32
    num_shards: int = 0  # 0 writes one consolidated file


def export_llamagen(options: LlamagenExport, console: Console) -> None:
    """Write a run's last checkpoint in the layout of LlamaGen's trainers."""
    step_dir = checkpoint.latest_checkpoint(options.run_dir)
    if not (options.run_dir / CONFIG_FILE).is_file() or step_dir is None:
        raise ConfigError(
            f"{options.run_dir} has no checkpoint to export; give a run directory with a checkpoint [TM673]"
        )
    config = load_any_config(options.run_dir / CONFIG_FILE)
    if isinstance(config, AutoencoderRunConfig):
        export_llamagen_tokenizer(options, config, step_dir, console)
        return
    if not isinstance(config, RunConfig) or not isinstance(config.model, LlamagenSpec):
        raise ConfigError(
            "--layout llamagen: this run trained another model; remove --layout, or give a run of the model "
            "llamagen [TM674]"
        )
    step = checkpoint.read_state(step_dir).step
    target = options.out / f"{step:07d}"
    if target.exists():
        raise ConfigError(f"--out: {target} exists already; give another folder, or remove this one [TM675]")
    with replace_directory(target) as partial:
        _export_generator(options, config, config.model, step_dir, partial)
    layout = f"in {options.num_shards} shards" if options.num_shards else "in one file"
    console.print(f"{target}: weights of {step_dir.name}, {layout}", highlight=False)


def export_llamagen_tokenizer(
    options: LlamagenExport, config: AutoencoderRunConfig, step_dir: Path, console: Console
) -> None:
    """Write a tokenizer as LlamaGen publishes them: a `.pt` file with {"model": tensors}."""
    spec = config.autoencoder
    if not isinstance(spec, VqSpec) or spec.quantizer != "codebook" or spec.norm_num_groups != NORM_GROUPS:
        quantizer = (
            f"'{spec.quantizer}' with {spec.norm_num_groups} groups"
            if isinstance(spec, VqSpec)
            else type(spec).__name__
        )
        raise ConfigError(
            f"--layout llamagen: expected a codebook and {NORM_GROUPS} normalization groups, as in the recipe "
            f"llamagen-vq, got {quantizer}; remove --layout to export for tastemaker [TM676]"
        )
    if options.out.suffix != ".pt":
        raise ConfigError(
            f"--out: a tokenizer is written as a PyTorch file, got '{options.out}'; use a name that ends in .pt [TM677]"
        )
    tensors, name = choose_weights(load_weights(config, options.run_dir, step_dir), options.weights)
    tensors = {key: x.detach().to(options.dtype, copy=True).cpu() for key, x in tensors.items()}
    with replace_file(options.out) as partial:
        torch.save({"model": {**tensors, "quantize.codebook_used": torch.zeros(CODEBOOK_USED_SIZE)}}, partial)
    console.print(f"{options.out}: {name} weights of {step_dir.name}", highlight=False)


def _export_generator(
    options: LlamagenExport, config: RunConfig, spec: LlamagenSpec, step_dir: Path, out: Path
) -> None:
    """Write weights, step and, if the run kept AdamW's moments in fp32, the optimizer state into a folder."""
    model = spec.load(Placement(dtype=torch.float32))
    parameter_names = tuple(name for name, _ in model.net.named_parameters())
    weights = config.tuning.apply(model, ())
    name = choose_checkpoint_snapshot(options.weights, step_dir)
    checkpoint.initialize_weights(step_dir, weights, "weights" if name == "live" else f"snapshots/{name}")
    merged = weights.merged() if isinstance(weights, LoraWeights) else model.net.state_dict()
    tensors = {key: x.detach().to(options.dtype) for key, x in merged.items()}
    state = checkpoint.read_state(step_dir)
    optimizer = None
    if not isinstance(weights, LoraWeights) and config.optim.state_dtype == "fp32":
        reader = checkpoint.open_group(step_dir, "optimizer")
        moments = {key: reader.read(key, 0, shape[0] if shape else 1) for key, shape in reader.shapes.items()}
        optimizer = AdamWCheckpointState(moments, config.optim, parameter_names)
    write_llamagen_checkpoint(out, tensors, optimizer, state.step, options.num_shards)


def resume_from_llamagen(run: Run, folder: Path) -> None:
    """Initialize a run with weights, moments and step of a checkpoint of LlamaGen's trainers."""
    shapes = {name: tuple(p.shape) for name, p in run.policy.weights.trainable().items()}
    tensors = loading.read_checkpoint(str(folder))
    moments, step = optimizer_state.read_optimizer_state(folder, shapes), optimizer_state.read_step(folder)
    initialize_from_trainer(run, tensors, moments, step, str(folder))


# The checkpoint folder of the trainers, named by its step: one file, or a shard for each rank


@dataclass(frozen=True)
class AdamWCheckpointState:
    """AdamW state as `<parameter>.<exp_avg|exp_avg_sq|step>`, and the optimizer settings."""

    moments: Tensors
    optim: OptimConfig
    parameter_names: tuple[str, ...]  # in the order of the network


def write_llamagen_checkpoint(
    folder: Path, tensors: Tensors, optimizer: AdamWCheckpointState | None, step: int, num_shards: int = 0
) -> None:
    """Write a checkpoint into an existing folder: `num_shards` shards, or one consolidated file if 0."""
    for rank in range(num_shards):
        write_rank_shard(tensors, folder / f"model.shard.{rank:05d}-of-{num_shards:05d}.pth", rank, num_shards)
    if not num_shards:
        torch.save({key: x.clone() for key, x in tensors.items()}, folder / CONSOLIDATED_FILE)
    world_size = num_shards or 1
    if optimizer is not None:
        for rank in range(world_size):
            path = folder / f"optimizer.{rank:05d}-of-{world_size:05d}.pth"
            torch.save(rank_optimizer_state(optimizer, rank, world_size), path)
    (folder / STATE_TYPE_FILE).write_text("sharded" if num_shards else "full", encoding="utf-8")
    (folder / STEP_FILE).write_text(str(step), encoding="utf-8")


def rank_optimizer_state(optimizer: AdamWCheckpointState, rank: int, world_size: int) -> dict[str, Any]:
    """Return the AdamW state of one rank: flat ranges of the parameters, or whole parameters with one rank."""
    moments, names = optimizer.moments, optimizer.parameter_names
    shapes = {name: tuple(moments[f"{name}.exp_avg"].shape) for name in names}
    ranges = fsdp_flat_ranges(shapes, world_size)[rank]
    state = {}
    for number, name in enumerate(optimizer_parameter_order(names)):
        first, count = ranges[name]
        averages = {key: moments[f"{name}.{key}"] for key in ("exp_avg", "exp_avg_sq")}
        if world_size > 1:
            averages = {key: x.reshape(-1)[first : first + count] for key, x in averages.items()}
        averages = {key: x.float().clone() for key, x in averages.items()}
        state[number] = {"step": moments[f"{name}.step"].float().clone(), **averages}
    return {"state": state, "param_groups": param_groups(optimizer)}


def param_groups(optimizer: AdamWCheckpointState) -> list[dict[str, Any]]:
    """Return the parameter groups as torch's AdamW saves them: with weight decay, then without."""
    num_decayed = sum("norm" not in name for name in optimizer.parameter_names)
    optim = optimizer.optim
    common = {"lr": optim.lr, "betas": optim.betas, "eps": optim.eps, "amsgrad": False, "maximize": False}
    common |= {"foreach": None, "capturable": False, "differentiable": False, "fused": None}
    common |= {"decoupled_weight_decay": True}
    return [
        {**common, "weight_decay": optim.weight_decay, "params": list(range(num_decayed))},
        {**common, "weight_decay": 0.0, "params": list(range(num_decayed, len(optimizer.parameter_names)))},
    ]


# Shards as FSDP saves them, written by one process without a process group


class TensorShard:
    """The rows of a tensor that one rank holds, pickled as torch's ShardedTensor."""

    def __init__(self, tensor: Tensor, rank: int, world_size: int) -> None:
        self.tensor, self.rank, self.world_size = tensor, rank, world_size

    def reduce(self) -> tuple[Any, ...]:
        """Return the function and arguments that rebuild a ShardedTensor when unpickled."""
        x, ranges = self.tensor, shard_row_ranges(len(self.tensor), self.world_size)
        shards = [
            ShardMetadata([first, *[0] * (x.ndim - 1)], [count, *x.shape[1:]], f"rank:{rank}/cpu")
            for rank, (first, count) in enumerate(ranges)
            if count
        ]
        first, count = ranges[self.rank]
        local = [Shard(x[first : first + count].clone(), shards[self.rank])] if count else []
        metadata = ShardedTensorMetadata(shards, x.shape, TensorProperties(dtype=x.dtype))
        placements: list[Any] = [f"rank:{rank}/cpu" for rank in range(self.world_size)]
        group = ShardedTensor.ProcessGroupState(self.rank, self.rank, self.world_size, self.world_size)
        arguments = (ShardedTensor, x.dtype, tuple(x.shape), x.stride(), 0, x.layout, torch.device("cpu"), False)
        state = (local, metadata, group, ChunkShardingSpec(0, placements), False)
        rebuild: Any = torch._utils._rebuild_wrapper_subclass
        return torch._tensor._rebuild_from_type_v2, (rebuild, ShardedTensor, arguments, state)


class _Pickler(pickle._Pickler):  # the Python implementation, because torch.save derives a class from it
    def reducer_override(self, value: Any) -> Any:
        return value.reduce() if isinstance(value, TensorShard) else NotImplemented


def shard_row_ranges(num_rows: int, world_size: int) -> list[tuple[int, int]]:
    """Return the first row and the number of rows of each rank: equal chunks, the last ones shorter or empty."""
    size = -(-num_rows // world_size)
    firsts = [min(rank * size, num_rows) for rank in range(world_size)]
    return [(first, min(size, num_rows - first)) for first in firsts]


def write_rank_shard(tensors: Tensors, path: Path, rank: int, world_size: int) -> None:
    """Write the file of one rank."""
    module: Any = ModuleType("pickle")
    module.Pickler, module.dumps, module.dump = _Pickler, pickle.dumps, pickle.dump
    shards = {key: TensorShard(x, rank, world_size) for key, x in tensors.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch deprecates ShardedTensor
        torch.save(shards, path, pickle_module=module)
