"""A checkpoint as LlamaGen's trainers write it: a folder named by its step, whole or in what each rank holds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..config.run import Optim
from ..models.checkpoints import KIND, STEP, WHOLE
from ..models.moments import order, slices
from .shards import write

Tensors = Mapping[str, Tensor]


@dataclass(frozen=True)
class Remembered:
    """What an optimizer remembers, as `<parameter>.<what>`, and how it was set."""

    moments: Tensors
    optim: Optim
    names: tuple[str, ...]  # of the parameters, as the network counts them


def write_folder(folder: Path, tensors: Tensors, memory: Remembered | None, step: int, ranks: int = 0) -> None:
    """Write everything into a folder that is there; `ranks` of them, or one whole file if 0."""
    if ranks:
        for rank in range(ranks):
            write(tensors, folder / f"model.shard.{rank:05d}-of-{ranks:05d}.pth", rank, ranks)
    else:
        torch.save({key: x.clone() for key, x in tensors.items()}, folder / WHOLE)
    world = ranks or 1
    if memory is not None:
        for rank in range(world):
            torch.save(remembered(memory, rank, world), folder / f"optimizer.{rank:05d}-of-{world:05d}.pth")
    (folder / KIND).write_text("sharded" if ranks else "full", encoding="utf-8")
    (folder / STEP).write_text(str(step), encoding="utf-8")


def remembered(memory: Remembered, rank: int, world: int) -> dict[str, Any]:
    """The state of one rank's AdamW; alone, it holds parameters whole."""
    shapes = {name: tuple(memory.moments[f"{name}.exp_avg"].shape) for name in memory.names}
    held = slices(shapes, world)[rank]
    state = {}
    for number, name in enumerate(order(memory.names)):
        first, count = held[name]
        kept = {what: memory.moments[f"{name}.{what}"] for what in ("exp_avg", "exp_avg_sq")}
        if world > 1:
            kept = {what: x.reshape(-1)[first : first + count] for what, x in kept.items()}
        moved = {what: x.float().clone() for what, x in kept.items()}
        state[number] = {"step": memory.moments[f"{name}.step"].float().clone(), **moved}
    return {"state": state, "param_groups": groups(memory)}


def groups(memory: Remembered) -> list[dict[str, Any]]:
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
