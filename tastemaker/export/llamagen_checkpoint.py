"""A checkpoint as LlamaGen's trainers write it: a folder named by its step, whole or in what each rank holds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..config.schema import OptimConfig
from ..models.llamagen.optimizer_state import fsdp_flat_ranges, optimizer_parameter_order
from ..models.loading import CONSOLIDATED_FILE, STATE_TYPE_FILE, STEP_FILE
from .fsdp_shards import write_rank_shard

Tensors = Mapping[str, Tensor]


@dataclass(frozen=True)
class AdamWCheckpointState:
    """AdamW state as `<parameter>.<exp_avg|exp_avg_sq|step>`, and the optimizer settings."""

    moments: Tensors
    optim: OptimConfig
    names: tuple[str, ...]  # of the parameters, as the network counts them


def write_llamagen_checkpoint(
    folder: Path, tensors: Tensors, memory: AdamWCheckpointState | None, step: int, ranks: int = 0
) -> None:
    """Write everything into a folder that is there; `ranks` of them, or one whole file if 0."""
    if ranks:
        for rank in range(ranks):
            write_rank_shard(tensors, folder / f"model.shard.{rank:05d}-of-{ranks:05d}.pth", rank, ranks)
    else:
        torch.save({key: x.clone() for key, x in tensors.items()}, folder / CONSOLIDATED_FILE)
    world = ranks or 1
    if memory is not None:
        for rank in range(world):
            torch.save(rank_optimizer_state(memory, rank, world), folder / f"optimizer.{rank:05d}-of-{world:05d}.pth")
    (folder / STATE_TYPE_FILE).write_text("sharded" if ranks else "full", encoding="utf-8")
    (folder / STEP_FILE).write_text(str(step), encoding="utf-8")


def rank_optimizer_state(memory: AdamWCheckpointState, rank: int, world: int) -> dict[str, Any]:
    """The state of one rank's AdamW; alone, it holds parameters whole."""
    shapes = {name: tuple(memory.moments[f"{name}.exp_avg"].shape) for name in memory.names}
    held = fsdp_flat_ranges(shapes, world)[rank]
    state = {}
    for number, name in enumerate(optimizer_parameter_order(memory.names)):
        first, count = held[name]
        kept = {what: memory.moments[f"{name}.{what}"] for what in ("exp_avg", "exp_avg_sq")}
        if world > 1:
            kept = {what: x.reshape(-1)[first : first + count] for what, x in kept.items()}
        moved = {what: x.float().clone() for what, x in kept.items()}
        state[number] = {"step": memory.moments[f"{name}.step"].float().clone(), **moved}
    return {"state": state, "param_groups": param_groups(memory)}


def param_groups(memory: AdamWCheckpointState) -> list[dict[str, Any]]:
    """As torch's AdamW saves them: parameters that decay, then those that do not."""
    decaying = sum("norm" not in name for name in memory.names)
    optim = memory.optim
    common = {"lr": optim.lr, "betas": optim.betas, "eps": optim.eps, "amsgrad": False, "maximize": False}
    common |= {"foreach": None, "capturable": False, "differentiable": False, "fused": None}
    common |= {"decoupled_weight_decay": True}
    return [
        {**common, "weight_decay": optim.weight_decay, "params": list(range(decaying))},
        {**common, "weight_decay": 0.0, "params": list(range(decaying, len(memory.names)))},
    ]
