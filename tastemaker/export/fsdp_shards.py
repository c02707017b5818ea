"""Pieces of tensors as ranks under FSDP save them, written by one process that belongs to no group of ranks."""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed._shard.sharded_tensor.metadata import ShardedTensorMetadata, TensorProperties
from torch.distributed._shard.sharded_tensor.shard import Shard
from torch.distributed._shard.sharding_spec import ChunkShardingSpec

RowRanges = list[tuple[int, int]]  # first row and rows


class TensorShard:
    """What one rank holds of a tensor, to be written as torch's ShardedTensor."""

    def __init__(self, whole: Tensor, rank: int, world: int) -> None:
        self.whole, self.rank, self.world = whole, rank, world

    def reduced(self) -> tuple[Any, ...]:
        x, held = self.whole, shard_row_ranges(len(self.whole), self.world)
        places = [
            ShardMetadata([first, *[0] * (x.ndim - 1)], [rows, *x.shape[1:]], f"rank:{rank}/cpu")
            for rank, (first, rows) in enumerate(held)
            if rows
        ]
        first, rows = held[self.rank]
        own = [Shard(x[first : first + rows].clone(), places[self.rank])] if rows else []
        told = ShardedTensorMetadata(places, x.shape, TensorProperties(dtype=x.dtype))
        ranks: list[Any] = [f"rank:{rank}/cpu" for rank in range(self.world)]
        group = ShardedTensor.ProcessGroupState(self.rank, self.rank, self.world, self.world)
        made = (ShardedTensor, x.dtype, tuple(x.shape), x.stride(), 0, x.layout, torch.device("cpu"), False)
        state = (own, told, group, ChunkShardingSpec(0, ranks), False)
        rebuild: Any = torch._utils._rebuild_wrapper_subclass
        return torch._tensor._rebuild_from_type_v2, (rebuild, ShardedTensor, made, state)


class _Pickler(pickle._Pickler):  # of Python, for torch.save makes a kind of it
    def reducer_override(self, value: Any) -> Any:
        return value.reduced() if isinstance(value, TensorShard) else NotImplemented


def shard_row_ranges(rows: int, world: int) -> RowRanges:
    """How FSDP cuts rows: like chunks, of which the last are shorter or empty."""
    size = -(-rows // world)
    firsts = [min(rank * size, rows) for rank in range(world)]
    return [(first, min(size, rows - first)) for first in firsts]


def write_rank_shard(tensors: Mapping[str, Tensor], path: Path, rank: int, world: int) -> None:
    """The file of one rank."""
    module: Any = ModuleType("pickle")
    module.Pickler, module.dumps, module.dump = _Pickler, pickle.dumps, pickle.dump
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch about the age of its own classes
        torch.save({key: TensorShard(x, rank, world) for key, x in tensors.items()}, path, pickle_module=module)
