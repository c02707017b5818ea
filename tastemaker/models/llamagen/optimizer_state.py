"""Read the AdamW state from the per-rank optimizer files of LlamaGen's trainers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...core.registry import ConfigError
from ..loading import CONSOLIDATED_FILE, SHARD_PATTERN, STATE_TYPE_FILE, STEP_FILE, list_rank_files
from ..restricted_unpickler import load_trainer_pickle

ParameterShapes = Mapping[str, tuple[int, ...]]
OPTIMIZER_PATTERN = "optimizer.*.pth"
FSDP_ALIGNMENT_BYTES = 16  # FSDP aligns every parameter within its flat parameter


def is_llamagen_checkpoint(folder: Path) -> bool:
    """Whether a folder is a checkpoint of LlamaGen's trainers."""
    return (
        (folder / CONSOLIDATED_FILE).is_file()
        or any(folder.glob(SHARD_PATTERN))
        or (folder / STATE_TYPE_FILE).is_file()
    )


def read_step(folder: Path) -> int:
    """The step of a checkpoint, from its file, or from the folder's name where released ones lack the file."""
    file = folder / STEP_FILE
    step = file.read_text(encoding="utf-8").strip() if file.is_file() else folder.name.rpartition("-")[2]
    if not step.isdecimal():
        raise ConfigError(
            f"{folder}: expected the number of completed steps in {STEP_FILE}, got '{step:.60}'; correct this "
            "file [TM454]"
        )
    return int(step)


def optimizer_parameter_order(names: Sequence[str]) -> list[str]:
    """Parameters in the order of the optimizer: with weight decay first, which have no "norm" in their names."""
    return [name for name in names if "norm" not in name] + [name for name in names if "norm" in name]


def read_optimizer_state(folder: Path, shapes: ParameterShapes) -> dict[str, Tensor]:
    """The state of every parameter as `<parameter>.<state>`, with the shards of all ranks concatenated."""
    ranks = [_read_rank_state(path) for path in list_rank_files(folder, OPTIMIZER_PATTERN)]
    if not ranks:
        raise ConfigError(
            f"{folder} holds no optimizer state ({OPTIMIZER_PATTERN}); start from the weights only, with "
            "model.weights [TM455]"
        )
    state: dict[str, Tensor] = {}
    for number, name in enumerate(optimizer_parameter_order(list(shapes))):
        shards = [rank[number] for rank in ranks if number in rank]
        if not shards:
            raise ConfigError(
                f"{folder}: the optimizer state does not contain '{name}', so it belongs to another model; use the "
                "model of this checkpoint [TM456]"
            )
        state[f"{name}.step"] = torch.as_tensor(shards[0]["step"], dtype=torch.float32)
        for moment in ("exp_avg", "exp_avg_sq"):
            pieces = [shard[moment] for shard in shards]
            state[f"{name}.{moment}"] = _join_shards(pieces, shapes[name], f"{folder}: '{name}'")
    return state


def _read_rank_state(path: Path) -> Mapping[int, Mapping[str, Any]]:
    data = load_trainer_pickle(path)
    state = data.get("state") if isinstance(data, Mapping) else None
    if not isinstance(state, Mapping):
        raise ConfigError(f"{path} is not an optimizer state; give the state dict of a torch optimizer [TM457]")
    return state


def _join_shards(pieces: Sequence[Tensor], shape: tuple[int, ...], name: str) -> Tensor:
    count = torch.Size(shape).numel()
    flat = torch.cat([piece.reshape(-1) for piece in pieces])[:count]  # hybrid sharding repeats all shards
    if len(flat) != count:
        raise ConfigError(
            f"{name} has {len(flat)} optimizer moments for {count} weights; set the model sizes to those of the "
            "checkpoint [TM458]"
        )
    return flat.view(shape).clone()


def fsdp_flat_ranges(shapes: ParameterShapes, world_size: int, bytes_each: int = 4) -> list[dict[str, tuple[int, int]]]:
    """For every rank, the first element and the number of elements of each parameter that FSDP keeps there.

    FSDP concatenates the parameters of each block, and those outside of blocks, and splits each into equal parts.
    """
    blocks: dict[str, list[str]] = {}
    for name in shapes:
        parts = name.split(".")
        blocks.setdefault(".".join(parts[:2]) if parts[0] == "layers" else "", []).append(name)
    ranges: list[dict[str, tuple[int, int]]] = [{} for _ in range(world_size)]
    for names in blocks.values():
        offsets, total = {}, 0
        for name in names:
            offsets[name] = total = total + -total % (FSDP_ALIGNMENT_BYTES // bytes_each)
            total += torch.Size(shapes[name]).numel()
        part = (total + -total % world_size) // world_size
        for rank in range(world_size):
            for name in names:
                count = torch.Size(shapes[name]).numel()
                first = min(max(rank * part - offsets[name], 0), count)
                ranges[rank][name] = first, max(0, min((rank + 1) * part - offsets[name], count) - first)
    return ranges
