"""Read the AdamW state from the per-rank optimizer files of LlamaGen's trainers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...core.registry import ConfigError
from ..loading import CONSOLIDATED_FILE, SHARD_PATTERN, STATE_TYPE_FILE, STEP_FILE, list_rank_files
from ..safe_unpickling import load_pickle

ParameterShapes = Mapping[str, tuple[int, ...]]
OPTIMIZER_PATTERN = "optimizer.*.pth"
FSDP_ALIGNMENT_BYTES = 16  # bytes, at multiples of which FSDP begins every parameter within the one it makes of a block


def is_llamagen_checkpoint(folder: Path) -> bool:
    """Whether a folder is a checkpoint of LlamaGen's trainers."""
    return (
        (folder / CONSOLIDATED_FILE).is_file()
        or any(folder.glob(SHARD_PATTERN))
        or (folder / STATE_TYPE_FILE).is_file()
    )


def read_step(folder: Path) -> int:
    """Steps done when a checkpoint was written; its name, where its file is missing, as in released ones."""
    file = folder / STEP_FILE
    said = file.read_text(encoding="utf-8").strip() if file.is_file() else folder.name.rpartition("-")[2]
    if not said.isdecimal():
        raise ConfigError(f"{folder}: '{said:.60}' is no step; write the number of steps done into {STEP_FILE}")
    return int(said)


def optimizer_parameter_order(names: Sequence[str]) -> list[str]:
    """Parameters as the optimizer counts them: those that decay first, which have no "norm" in their names."""
    return [name for name in names if "norm" not in name] + [name for name in names if "norm" in name]


def read_optimizer_state(folder: Path, shapes: ParameterShapes) -> dict[str, Tensor]:
    """Of every parameter, as `<parameter>.<what>`; what ranks held put end to end is the whole."""
    ranks = [_state(path) for path in list_rank_files(folder, OPTIMIZER_PATTERN)]
    if not ranks:
        raise ConfigError(f"{folder} holds no {OPTIMIZER_PATTERN}; start from its weights alone, as model.weights")
    found: dict[str, Tensor] = {}
    for number, name in enumerate(optimizer_parameter_order(list(shapes))):
        held = [rank[number] for rank in ranks if number in rank]
        if not held:
            raise ConfigError(
                f"{folder}: the optimizer remembers nothing of '{name}'; was another model trained there?"
            )
        found[f"{name}.step"] = torch.as_tensor(held[0]["step"], dtype=torch.float32)
        for what in ("exp_avg", "exp_avg_sq"):
            found[f"{name}.{what}"] = _whole([state[what] for state in held], shapes[name], f"{folder}: '{name}'")
    return found


def _state(path: Path) -> Mapping[int, Mapping[str, Any]]:
    data = load_pickle(path)
    state = data.get("state") if isinstance(data, Mapping) else None
    if not isinstance(state, Mapping):
        raise ConfigError(f"{path} is no state of an optimizer; expected what torch's optimizers save")
    return state


def _whole(pieces: Sequence[Tensor], shape: tuple[int, ...], what: str) -> Tensor:
    count = torch.Size(shape).numel()
    flat = torch.cat([piece.reshape(-1) for piece in pieces])[:count]  # with hybrid sharding all of it comes again
    if len(flat) != count:
        raise ConfigError(f"{what} has {len(flat)} moments for {count} weights; set the sizes it was trained with")
    return flat.view(shape).clone()


def fsdp_flat_ranges(shapes: ParameterShapes, world: int, bytes_each: int = 4) -> list[dict[str, tuple[int, int]]]:
    """Of every rank, the first element and the count of what FSDP leaves it of each parameter.

    FSDP lays the parameters of a block end to end, and those outside of blocks, and cuts either into equal parts.
    """
    blocks: dict[str, list[str]] = {}
    for name in shapes:
        parts = name.split(".")
        blocks.setdefault(".".join(parts[:2]) if parts[0] == "layers" else "", []).append(name)
    held: list[dict[str, tuple[int, int]]] = [{} for _ in range(world)]
    for names in blocks.values():
        begins, total = {}, 0
        for name in names:
            begins[name] = total = total + -total % (FSDP_ALIGNMENT_BYTES // bytes_each)
            total += torch.Size(shapes[name]).numel()
        share = (total + -total % world) // world
        for rank in range(world):
            for name in names:
                count = torch.Size(shapes[name]).numel()
                first = min(max(rank * share - begins[name], 0), count)
                held[rank][name] = first, max(0, min((rank + 1) * share - begins[name], count) - first)
    return held
